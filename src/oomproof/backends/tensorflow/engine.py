"""How TensorFlow computes with a model: tapes, sparse gradients, and data of every kind cut into pieces."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from keras import tree

from oomproof.backends.common.engine import Compute, Outcome, Piece
from oomproof.backends.common.model import call, first_tensor
from oomproof.backends.tensorflow.pieces import finished, over_pieces, size_of, take
from oomproof.backends.tensorflow.writes import PendingWrites


class TensorFlowEngine:
    """See `common.engine.Engine`.

    Args:
        model: The model.
        static: Whether piece sizes must be known while tracing (XLA).
    """

    wide = "float64"
    take = staticmethod(take)
    size_of = staticmethod(size_of)

    def __init__(self, model: Any, static: bool = False) -> None:
        self.model = model
        self.static = static

    def scope(self, state: Sequence[tuple[Any, Any]] = ()) -> PendingWrites:
        return PendingWrites(self.model.trainable_variables, state)

    def call(self, x: Any, training: bool) -> Any:
        return call(self.model, x, training)

    def run(self, compute: Compute, inputs: Sequence[Any] = ()) -> list[Any]:
        return compute(*inputs)[1]

    def differentiate(self, compute: Compute, inputs: Sequence[Any] = ()) -> tuple[list[Any], list[Any], list[Any]]:
        variables = [variable._value for variable in self.model.trainable_weights]
        with tf.GradientTape() as tape:
            tape.watch(list(inputs))
            target, results = compute(*inputs)
        found: list[Any] = tape.gradient(target, [*variables, *inputs])
        for gradient, source in zip(found, [*variables, *inputs], strict=True):
            if isinstance(gradient, tf.Tensor):
                # Not always known while tracing, such as that of a kernel applied to sequences.
                gradient.set_shape(source.shape)
        return results, found[: len(variables)], found[len(variables) :]

    def over_pieces(self, piece: Piece, batch_size: Any, count: Any, state: list[Any]) -> Outcome:
        outcome = over_pieces(piece, batch_size, count, [tf.convert_to_tensor(v) for v in state], self.static)
        outcome.gradients = finished(outcome.gradients, [v._value for v in self.model.trainable_weights])
        return outcome

    def samples_for_keras(self, x: Any) -> Any:
        return tf.shape(first_tensor(x))[0]

    def metrics_see_masks(self, training: bool) -> bool:
        return True

    def opened(self, rows: list[Any]) -> list[Any]:
        return [tf.raw_ops.PlaceholderWithDefault(input=row, shape=[None, *row.shape[1:]]) for row in rows]

    def add(self, a: Any, b: Any) -> Any:
        if a is None or b is None:
            return b if a is None else a
        if isinstance(a, tf.IndexedSlices) and isinstance(b, tf.IndexedSlices):
            values, indices = tf.concat([a.values, b.values], 0), tf.concat([a.indices, b.indices], 0)
            return tf.IndexedSlices(values, indices, dense_shape=a.dense_shape)
        return tf.convert_to_tensor(a) + tf.convert_to_tensor(b)


def as_tensor(leaf: Any) -> Any:
    """Data as a graph takes it. Keras marks a part that is not there with an empty Optional."""
    if leaf is None or isinstance(leaf, tf.experimental.Optional):
        return None
    return leaf if tf.is_tensor(leaf) else tf.convert_to_tensor(leaf)


def as_tensors(data: Any) -> Any:
    return tree.map_structure(as_tensor, data)
