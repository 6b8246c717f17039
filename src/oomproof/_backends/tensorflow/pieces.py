"""Batches of TensorFlow data cut into pieces, and a loop over the pieces that holds one at a time."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import tensorflow as tf
from keras import tree

from oomproof._backends.common.engine import Outcome, Piece
from oomproof._backends.pieces import largest_piece, piece_bounds, piece_count


def size_of(leaf: Any) -> Any:
    """Samples in a tensor, as an int where it is known and as a tensor where it is not."""
    static = leaf.shape[0] if leaf.shape.rank else None
    if static is not None:
        return static
    if isinstance(leaf, tf.RaggedTensor):
        return leaf.nrows()
    return tf.shape(leaf, out_type=tf.int64)[0]


def on_host(leaf: Any) -> bool:
    """Whether a tensor is in the host's memory. Nobody knows that of one inside of a graph."""
    values = getattr(leaf, "flat_values", getattr(leaf, "values", leaf))
    return "CPU" in (getattr(values, "device", None) or "")


def host(wanted: bool = True) -> AbstractContextManager[Any]:
    return tf.device("CPU:0") if wanted else contextlib.nullcontext()


def take(data: Any, start: Any, size: Any, from_host: bool = False) -> Any:
    """Samples `start` to `start + size` of every tensor of the batch.

    What is on the host is cut there: TensorFlow would move all of it to the device to cut a piece off, every time.

    Args:
        data: The batch.
        start: The first sample.
        size: Number of samples.
        from_host: Whether the batch is on the host, for one inside of a graph.
    """

    def placed(leaf: Any) -> Any:
        if leaf is None:
            return None
        with host(from_host or (tf.executing_eagerly() and on_host(leaf))):
            return cut(leaf)

    def cut(leaf: Any) -> Any:
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

    return tree.map_structure(placed, data)


def placeholders(data: Any) -> Any:
    """Placeholders in the graph that is being traced, for tensors that are only looked at.

    A graph lives until the garbage is collected. So would what it captures, and a few rows are a view of all the batch.
    """
    return tf.nest.map_structure(
        lambda leaf: tf.compat.v1.placeholder(leaf.dtype, leaf.shape) if tf.is_tensor(leaf) else leaf,
        data,
        expand_composites=True,
    )


def pick(data: Any, samples: Sequence[int]) -> Any:
    """Some samples of a batch, in this order."""

    def picked(leaf: Any) -> Any:
        if leaf is None:
            return None
        rows = [take(leaf, index, 1) for index in samples]
        return tf.sparse.concat(0, rows) if isinstance(leaf, tf.SparseTensor) else tf.concat(rows, axis=0)

    return tree.map_structure(picked, data)


def over_pieces(
    piece: Piece, batch_size: Any, count: Any, state: list[Any], static: bool, largest: Collection[int] = ()
) -> Outcome:
    """Runs `piece(start, size, state)` for each piece in turn.

    Args:
        piece: Computes one piece.
        batch_size: Samples in the batch.
        count: Number of pieces: an int, or a tensor so that it can change without a new trace.
        state: What the first piece starts from.
        static: Piece sizes must be known while tracing, as XLA wants it. `batch_size` and `count` are ints then.
        largest: Positions of gradients that are not added up: the largest values count.
    """
    if tf.executing_eagerly():
        return _eagerly(piece, int(batch_size), int(count), state, largest)
    if isinstance(count, int) and count == 1:
        return piece(0, batch_size, state)
    if not static:
        batch_size, count = tf.cast(batch_size, tf.int64), tf.cast(count, tf.int64)

        def bounds(index: Any) -> tuple[Any, Any]:
            start = index * batch_size // count
            return start, (index + 1) * batch_size // count - start

        return _in_graph(piece, count, bounds, state, largest)
    size = largest_piece(batch_size, count)
    whole, rest = divmod(batch_size, size)
    outcome = _in_graph(piece, whole, lambda index: (index * size, size), state, largest)
    if rest:
        last = piece(whole * size, rest, outcome.state)
        outcome = _join(outcome, last, largest)
    return outcome


def _eagerly(piece: Piece, batch_size: int, count: int, state: list[Any], largest: Collection[int]) -> Outcome:
    outcome: Outcome | None = None
    for start, stop in piece_bounds(batch_size, count):
        last = piece(start, stop - start, state if outcome is None else outcome.state)
        outcome = last if outcome is None else _join(outcome, last, largest)
    assert outcome is not None
    return outcome


def _join(first: Outcome, second: Outcome, largest: Collection[int]) -> Outcome:
    pairs = enumerate(zip(first.gradients, second.gradients, strict=True))
    return Outcome(
        state=second.state,
        sums=[a + b for a, b in zip(first.sums, second.sums, strict=True)],
        gradients=[_accumulated(a, b, index in largest) for index, (a, b) in pairs],
        rows=[tf.concat([a, b], axis=0) for a, b in zip(first.rows, second.rows, strict=True)],
    )


def _accumulated(a: Any, b: Any, larger: bool) -> Any:
    if a is None or b is None:
        return b if a is None else a
    if larger:
        return tf.maximum(a, b)
    if isinstance(a, tf.IndexedSlices):
        values, indices = tf.concat([a.values, b.values], axis=0), tf.concat([a.indices, b.indices], axis=0)
        return tf.IndexedSlices(values, indices)
    return _widened(a) + _widened(b)


def finished(
    gradients: list[Any],
    variables: Sequence[Any],
    pieces: Any = 1,
    shared: Collection[int] = (),
    merged: Collection[int] = (),
) -> list[Any]:
    """Gradients as a tape gives them: in the precision of their variables, sparse ones with the variable's shape.

    Args:
        gradients: Of all pieces.
        variables: Their variables.
        pieces: Number of pieces.
        shared: Positions of sparse gradients whose rows the whole batch has once, and here each piece has.
        merged: Positions of sparse gradients that have each row of their table once, however often it is used.
    """

    def finish(position: int, gradient: Any, variable: Any) -> Any:
        if isinstance(gradient, tf.IndexedSlices):
            values, indices = gradient.values, gradient.indices
            if position in shared:
                rows = tf.shape(indices)[0] // tf.cast(pieces, tf.int32)
                by_piece = tf.reshape(values, tf.concat([[tf.cast(pieces, tf.int32), rows], tf.shape(values)[1:]], 0))
                values, indices = tf.reduce_sum(by_piece, axis=0), indices[:rows]
                values.set_shape([None, *variable.shape[1:]])
            elif position in merged:
                indices, places = tf.unique(indices)
                values = tf.math.unsorted_segment_sum(values, places, tf.size(indices))
            shape = tf.constant(tuple(variable.shape), indices.dtype)
            return tf.IndexedSlices(values, indices, dense_shape=shape)
        return gradient if gradient is None else tf.cast(gradient, variable.dtype)

    if not gradients:
        return []
    return [finish(at, *pair) for at, pair in enumerate(zip(gradients, variables, strict=True))]


def number_of_pieces(batch_size: Any, count: Any, static: bool) -> Any:
    """How many pieces `over_pieces` really makes: under XLA they are all of one size but for the last."""
    if not static or tf.executing_eagerly():
        return count
    return piece_count(batch_size, largest_piece(batch_size, count))


def _widened(gradient: Any) -> Any:
    """Half precision loses the small pieces of a sum."""
    if isinstance(gradient, tf.Tensor) and gradient.dtype.size < 4:
        return tf.cast(gradient, tf.float32)
    return gradient


class _Accumulator:
    """The outcomes of pieces as a loop in a graph keeps them: sums of what adds up, and lists of what has rows.

    Args:
        like: What a piece hands on.
        largest: Positions of gradients that are not added up: the largest values count.
    """

    def __init__(self, like: Outcome, largest: Collection[int]) -> None:
        self._like = like
        self._dense = [index for index, g in enumerate(like.gradients) if isinstance(g, tf.Tensor)]
        self._sparse = [index for index, g in enumerate(like.gradients) if isinstance(g, tf.IndexedSlices)]
        self._larger = [False] * len(like.sums) + [index in largest for index in self._dense]

    def begun(self, count: Any) -> tuple[list[Any], list[tf.TensorArray]]:
        """Sums and lists before the first piece."""
        sums = [
            tf.fill(value.shape, value.dtype.min) if larger else tf.zeros(value.shape, value.dtype)
            for larger, value in zip(self._larger, self._adding(self._like), strict=True)
        ]
        size = tf.cast(count, tf.int32)
        # Each is written once and read once, so it can hold pieces of different sizes.
        lists = [
            tf.TensorArray(
                value.dtype,
                size,
                infer_shape=False,
                element_shape=value.shape if isinstance(count, int) else tf.TensorShape([None, *value.shape[1:]]),
            )
            for value in self._listed(self._like)
        ]
        return sums, lists

    def with_piece(
        self, outcome: Outcome, at: Any, sums: list[Any], lists: list[tf.TensorArray]
    ) -> tuple[list[Any], list[tf.TensorArray]]:
        """The same with one more piece, the one at this place."""
        both = zip(self._larger, sums, self._adding(outcome), strict=True)
        sums = [tf.maximum(total, value) if larger else total + value for larger, total, value in both]
        return sums, [each.write(at, part) for each, part in zip(lists, self._listed(outcome), strict=True)]

    def outcome(self, state: list[Any], sums: list[Any], lists: list[tf.TensorArray]) -> Outcome:
        """What all pieces hand on."""
        joined = [each.concat() for each in lists]
        gradients: list[Any] = [None] * len(self._like.gradients)
        first = len(self._like.sums)
        for index, total in zip(self._dense, sums[first:], strict=True):
            gradients[index] = total
        for number, index in enumerate(self._sparse):
            values, indices = joined[2 * number : 2 * number + 2]
            gradients[index] = tf.IndexedSlices(values, indices)
        return Outcome(state, sums[:first], gradients, joined[2 * len(self._sparse) :])

    def _adding(self, outcome: Outcome) -> list[Any]:
        return [*outcome.sums, *(_widened(outcome.gradients[index]) for index in self._dense)]

    def _listed(self, outcome: Outcome) -> list[Any]:
        slices = [outcome.gradients[index] for index in self._sparse]
        return [*(part for s in slices for part in (s.values, s.indices)), *outcome.rows]


def _in_graph(
    piece: Piece,
    count: Any,
    bounds: Callable[[Any], tuple[Any, Any]],
    state: list[Any],
    largest: Collection[int],
) -> Outcome:
    accumulator = _Accumulator(_traced_once(piece, bounds, state), largest)
    # Counted on the host, where it is asked whether to go on: the device would be waited for.
    counting = isinstance(count, tf.Tensor)

    def more(index: Any, *_: Any) -> Any:
        with host(counting):
            return index < tf.cast(count, tf.int64)

    def body(index: Any, state: list[Any], sums: list[Any], lists: list[Any]) -> Any:
        with host(counting):
            start, size = bounds(index)
            at, after = tf.cast(index, tf.int32), index + 1
        outcome = piece(start, size, state)
        return after, outcome.state, *accumulator.with_piece(outcome, at, sums, lists)

    with host(counting):
        zero = tf.constant(0, tf.int64)
    _, state, sums, lists = tf.while_loop(
        more,
        body,
        (zero, state, *accumulator.begun(count)),
        # More than one piece at a time would hold more than one piece's activations.
        parallel_iterations=1,
        maximum_iterations=count if isinstance(count, int) else None,
    )
    return accumulator.outcome(state, sums, lists)


def _traced_once(piece: Piece, bounds: Callable[[Any], tuple[Any, Any]], state: list[Any]) -> Outcome:
    """What a piece hands on, its gradients as they are added up, from a trace that is thrown away."""
    with tf.__internal__.FuncGraph("shape_of_a_piece").as_default():
        start, size = bounds(tf.constant(0, tf.int64))
        outcome = piece(start, size, state)
        # Nothing more can be computed from them outside of this graph.
        outcome.gradients = [_widened(gradient) for gradient in outcome.gradients]
        return outcome


def joined(leaves: Sequence[Any]) -> Any:
    """Predictions of pieces, those that came to the host put together there."""
    if isinstance(leaves[0], np.ndarray):
        with tf.device("CPU:0"):
            return tf.convert_to_tensor(np.concatenate(leaves, axis=0))
    if isinstance(leaves[0], tf.SparseTensor):
        return tf.sparse.concat(0, list(leaves))
    return tf.concat(list(leaves), axis=0)


def to_host(tensor: Any) -> Any:
    return np.array(tensor) if isinstance(tensor, tf.Tensor) else tensor


def signature_of(leaf: Any) -> Any:
    """What decides which trace a tensor fits."""
    return None if leaf is None else (tuple(leaf.shape), leaf.dtype)
