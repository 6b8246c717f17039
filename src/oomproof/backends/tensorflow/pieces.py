"""Batches of TensorFlow data cut into pieces, and a loop over the pieces that holds one at a time."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import tensorflow as tf
from keras import tree


def batch_leaves(data: Any) -> list[Any]:
    return [leaf for leaf in tree.flatten(data) if leaf is not None]


def size_of(leaf: Any) -> Any:
    """Samples in a tensor, as an int where it is known and as a tensor where it is not."""
    static = leaf.shape[0] if leaf.shape.rank else None
    if static is not None:
        return static
    if isinstance(leaf, tf.RaggedTensor):
        return leaf.nrows()
    return tf.shape(leaf, out_type=tf.int64)[0]


def take(data: Any, start: Any, size: Any) -> Any:
    """Samples `start` to `start + size` of every tensor of the batch."""

    def cut(leaf: Any) -> Any:
        if leaf is None:
            return None
        if isinstance(leaf, tf.SparseTensor):
            rest = tf.cast(leaf.dense_shape[1:], tf.int64)
            begin = tf.concat([[tf.cast(start, tf.int64)], tf.zeros_like(rest)], axis=0)
            piece = tf.sparse.slice(leaf, begin, tf.concat([[tf.cast(size, tf.int64)], rest], axis=0))
            piece.set_shape([None, *leaf.shape[1:]])
            return piece
        if isinstance(leaf, tf.RaggedTensor):
            return leaf[start : start + size]
        index = tf.cast(start, tf.int32)
        begin = tf.stack([index, *[0] * (leaf.shape.rank - 1)])
        lengths = tf.stack([tf.cast(size, tf.int32), *[-1] * (leaf.shape.rank - 1)])
        piece = tf.slice(leaf, begin, lengths)
        piece.set_shape([size if isinstance(size, int) else None, *leaf.shape[1:]])
        return piece

    return tree.map_structure(cut, data)


@dataclasses.dataclass
class Outcome:
    """What a piece hands on. Lists keep their order over all pieces.

    Attributes:
        state: Values each piece takes over from the one before (random seeds, metrics).
        sums: Tensors that add up over pieces; a `None` stays `None`.
        slices: Sparse gradients; their rows are put one behind the other, never merged.
        rows: Tensors with a row for each sample, put one behind the other.
    """

    state: list[Any]
    sums: list[Any] = dataclasses.field(default_factory=list)
    slices: list[tf.IndexedSlices] = dataclasses.field(default_factory=list)
    rows: list[Any] = dataclasses.field(default_factory=list)


Piece = Callable[[Any, Any, list[Any]], Outcome]


def over_pieces(piece: Piece, batch_size: Any, count: Any, state: list[Any], static: bool) -> Outcome:
    """Runs `piece(start, size, state)` for each piece in turn.

    Args:
        piece: Computes one piece.
        batch_size: Samples in the batch.
        count: Number of pieces: an int, or a tensor so that it can change without a new trace.
        state: What the first piece starts from.
        static: Piece sizes must be known while tracing, as XLA wants it. `batch_size` and `count` are ints then.
    """
    if tf.executing_eagerly():
        return _eagerly(piece, int(batch_size), int(count), state)
    if isinstance(count, int) and count == 1:
        return piece(0, batch_size, state)
    if not static:
        batch_size, count = tf.cast(batch_size, tf.int64), tf.cast(count, tf.int64)

        def bounds(index: Any) -> tuple[Any, Any]:
            start = index * batch_size // count
            return start, (index + 1) * batch_size // count - start

        return _in_graph(piece, count, bounds, state)
    size = -(-batch_size // count)
    whole, rest = divmod(batch_size, size)
    outcome = _in_graph(piece, whole, lambda index: (index * size, size), state)
    if rest:
        last = piece(whole * size, rest, outcome.state)
        outcome = _join([outcome, last])
    return outcome


def _eagerly(piece: Piece, batch_size: int, count: int, state: list[Any]) -> Outcome:
    outcome: Outcome | None = None
    for index in range(count):
        start = index * batch_size // count
        size = (index + 1) * batch_size // count - start
        last = piece(start, size, state if outcome is None else outcome.state)
        outcome = last if outcome is None else _join([outcome, last])
    assert outcome is not None
    return outcome


def _join(outcomes: list[Outcome]) -> Outcome:
    first, *others = outcomes
    for other in others:
        first = Outcome(
            state=other.state,
            sums=[None if a is None else a + b for a, b in zip(first.sums, other.sums, strict=True)],
            slices=[_append(a, b) for a, b in zip(first.slices, other.slices, strict=True)],
            rows=[tf.concat([a, b], axis=0) for a, b in zip(first.rows, other.rows, strict=True)],
        )
    return first


def _append(a: tf.IndexedSlices, b: tf.IndexedSlices) -> tf.IndexedSlices:
    values, indices = tf.concat([a.values, b.values], axis=0), tf.concat([a.indices, b.indices], axis=0)
    return tf.IndexedSlices(values, indices)


def _in_graph(piece: Piece, count: Any, bounds: Callable[[Any], tuple[Any, Any]], state: list[Any]) -> Outcome:
    shape_of = _traced_once(piece, bounds, state)
    present = [index for index, total in enumerate(shape_of.sums) if total is not None]

    def lists(tensors: list[Any]) -> list[tf.TensorArray]:
        # Each is written once and read once, so it can hold pieces of different sizes.
        shapes = [tf.TensorShape([None, *t.shape[1:]]) for t in tensors]
        size = tf.cast(count, tf.int32)
        return [
            tf.TensorArray(
                t.dtype, size, infer_shape=False, element_shape=shape if not isinstance(count, int) else t.shape
            )
            for t, shape in zip(tensors, shapes, strict=True)
        ]

    def body(index: Any, state: list[Any], sums: list[Any], slices: list[Any], rows: list[Any]) -> Any:
        start, size = bounds(index)
        outcome = piece(start, size, state)
        at = tf.cast(index, tf.int32)
        sums = [total + outcome.sums[i] for i, total in zip(present, sums, strict=True)]
        parts = [part for s in outcome.slices for part in (s.values, s.indices)]
        slices = [array.write(at, part) for array, part in zip(slices, parts, strict=True)]
        rows = [array.write(at, row) for array, row in zip(rows, outcome.rows, strict=True)]
        return index + 1, outcome.state, sums, slices, rows

    start = (
        tf.constant(0, tf.int64),
        state,
        [tf.zeros(shape_of.sums[i].shape, shape_of.sums[i].dtype) for i in present],
        lists([part for s in shape_of.slices for part in (s.values, s.indices)]),
        lists(shape_of.rows),
    )
    _, state, sums, slices, rows = tf.while_loop(
        lambda index, *_: index < tf.cast(count, tf.int64),
        body,
        start,
        # More than one piece in flight would hold more than one piece's activations.
        parallel_iterations=1,
        maximum_iterations=count if isinstance(count, int) else None,
    )
    all_sums: list[Any] = [None] * len(shape_of.sums)
    for i, total in zip(present, sums, strict=True):
        all_sums[i] = total
    joined = [array.concat() for array in slices]
    return Outcome(
        state=state,
        sums=all_sums,
        slices=[tf.IndexedSlices(v, i) for v, i in zip(joined[::2], joined[1::2], strict=True)],
        rows=[array.concat() for array in rows],
    )


def _traced_once(piece: Piece, bounds: Callable[[Any], tuple[Any, Any]], state: list[Any]) -> Outcome:
    """The structure of what a piece hands on, from a trace that is thrown away."""
    with tf.__internal__.FuncGraph("shape_of_a_piece").as_default():
        start, size = bounds(tf.constant(0, tf.int64))
        return piece(start, size, state)
