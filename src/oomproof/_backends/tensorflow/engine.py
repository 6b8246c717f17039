"""How TensorFlow computes with a model: tapes, sparse gradients, and data of every kind cut into pieces."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import tensorflow as tf
from keras import tree

from oomproof._backends.common.drawing import RandomNumbers
from oomproof._backends.common.engine import Compute, Outcome, Piece
from oomproof._backends.common.head import HeadApart
from oomproof._backends.common.model import call, first_tensor, overwritten
from oomproof._backends.common.recompute import recomputing
from oomproof._backends.tensorflow.commit import changed
from oomproof._backends.tensorflow.draws import TensorFlowRandom
from oomproof._backends.tensorflow.pieces import finished, number_of_pieces, over_pieces, pick, size_of, take
from oomproof._backends.tensorflow.size_checks import insist
from oomproof._backends.tensorflow.writes import PendingWrites
from oomproof._compat.tensorflow import InaccessibleTensorError, record, variable_accessed


class TensorFlowEngine(RandomNumbers, HeadApart):
    """See `common.engine.Engine`.

    Args:
        model: The model.
        static: Whether piece sizes must be known while tracing (XLA).

    Attributes:
        from_host: Whether batches are in the host's memory, and cut there.
        shared_rows: Positions of the weights whose sparse gradient has the same rows whatever the samples, such as that
            of positions that are looked up: pieces add to them. Rows of others are put one behind the other.
        merged_rows: Positions of those whose sparse gradient has each row once, such as that of a kernel that sparse
            inputs are multiplied with.
    """

    wide = "float64"
    tensor = tf.Tensor
    gone: tuple[type[Exception], ...] = (InaccessibleTensorError,)
    recompute: tuple[str, ...] = ()
    from_host = False
    shared_rows: frozenset[int] = frozenset()
    merged_rows: frozenset[int] = frozenset()
    take_rows = staticmethod(take)
    size_of = staticmethod(size_of)
    insist = staticmethod(insist)

    def __init__(self, model: Any, static: bool = False) -> None:
        super().__init__(model, TensorFlowRandom(compiled=static))
        self.model = model
        self.static = static
        self._tape: tf.GradientTape | None = None

    @property
    def multiplies_coarsely(self) -> bool:
        return (
            bool(tf.config.list_logical_devices("GPU")) and tf.config.experimental.tensor_float_32_execution_enabled()
        )

    def scope(self, state: Sequence[tuple[Any, Any]] = ()) -> PendingWrites:
        return PendingWrites(self.model.trainable_variables, state)

    def changed(self, variables: Sequence[Any], change: Callable[[Any], Any]) -> AbstractContextManager[None]:
        return changed([variable._value for variable in variables], change)

    def call(self, x: Any, training: bool) -> Any:
        with recomputing(self.model, self.recompute if training else (), self):
            return call(self.model, x, training)

    @staticmethod
    def flat(structure: Any) -> tuple[list[Any], Callable[[list[Any]], Any]]:
        values = tree.map_structure(
            lambda leaf: tf.identity(leaf) if isinstance(leaf, tf.Variable) else leaf, structure
        )
        leaves = tf.nest.flatten(values, expand_composites=True)
        # Only its shape is kept: run eagerly, a structure would hold its tensors.
        shape = tree.map_structure(
            lambda leaf: (
                tf.type_spec_from_value(leaf) if tf.is_tensor(leaf) and not isinstance(leaf, tf.Tensor) else None
            ),
            values,
        )
        return leaves, lambda leaves: tf.nest.pack_sequence_as(shape, leaves, expand_composites=True)

    def recomputed(self, function: Callable[..., list[Any]], tensors: list[Any]) -> list[Any]:
        # Not `tf.recompute_grad`: it adds to what goes in, and turns the sparse gradients of tables into dense ones.
        with record.VariableWatcher() as watcher, record.stop_recording():
            results = [tf.identity(result) for result in function(*tensors)]
        variables = watcher.watched_variables()
        for variable in variables:
            variable_accessed(variable)
        wanted = [index for index, tensor in enumerate(tensors) if record.should_record_backprop([tensor])]
        wanted_variables = [v for v in variables if record.should_record_backprop([v.handle])]
        floating = [index for index, result in enumerate(results) if result.dtype.is_floating]

        def backward(*slopes: Any) -> list[Any]:
            slopes = tuple(tf.convert_to_tensor(slope) for slope in slopes)
            with tf.GradientTape(watch_accessed_variables=False) as tape, self._not_before(slopes, tensors) as again:
                sources = [*(again[index] for index in wanted), *wanted_variables]
                for source in sources:
                    tape.watch(source)
                targets = function(*again)
            found: list[Any] = tape.gradient([targets[index] for index in floating], sources, output_gradients=slopes)
            return self._weights_first(found[: len(wanted)], found[len(wanted) :])

        sources = [*(tensors[index] for index in wanted), *(v.handle for v in wanted_variables)]
        record.record_operation("Recomputed", [results[index] for index in floating], sources, backward)
        return results

    def _weights_first(self, slopes: list[Any], gradients: list[Any]) -> list[Any]:
        """What a segment hands on, not before the gradients of its weights are there.

        They need what was computed again. Whenever they are late, one segment after the other would be computed again
        while all of that is held.
        """
        if not (tf.executing_eagerly() or self.static):
            done = [part for part in tf.nest.flatten(gradients, expand_composites=True) if part is not None]
            with tf.control_dependencies(done):
                slopes = [tf.identity(slope) if isinstance(slope, tf.Tensor) else slope for slope in slopes]
        return [*slopes, *gradients]

    @contextlib.contextmanager
    def _not_before(self, slopes: Sequence[Any], tensors: Sequence[Any]) -> Iterator[list[Any]]:
        """The same tensors, such that what is made of them waits for the slopes and is not merged with what was."""
        if tf.executing_eagerly():
            yield list(tensors)
        elif self.static:
            # XLA heeds no control dependencies, and on CPUs no barriers: what depends on the slopes comes after them.
            # It does not see that no bit is greater than one. What it is told of floats it may take for impossible.
            some = tf.reshape(slopes[0], [-1])[0]
            bits = tf.bitcast(some, {2: tf.int16, 4: tf.int32, 8: tf.int64}[some.dtype.size])
            dependent = tf.bitwise.bitwise_and(bits, tf.ones_like(bits)) > 1
            yield [tf.where(dependent, tf.zeros_like(tensor), tensor) for tensor in tensors]
        else:
            with tf.control_dependencies(slopes):
                yield [tf.identity(tensor) for tensor in tensors]

    def losses_of_call(self) -> AbstractContextManager[None]:
        return contextlib.nullcontext()

    def run(self, compute: Compute, inputs: Sequence[Any] = ()) -> list[Any]:
        return compute(*inputs)[1]

    def differentiate(self, compute: Compute, inputs: Sequence[Any] = ()) -> tuple[list[Any], list[Any], list[Any]]:
        variables = [variable._value for variable in self.model.trainable_weights]
        outer = self._tape
        try:
            with tf.GradientTape() as tape:
                self._tape = tape
                tape.watch([value for value in inputs if value.dtype.is_floating])
                target, results = compute(*inputs)
        finally:
            self._tape = outer
        found: list[Any] = tape.gradient(target, [*variables, *inputs])
        for gradient, source in zip(found, [*variables, *inputs], strict=True):
            if isinstance(gradient, tf.Tensor):
                # Not always known while tracing, such as that of a kernel applied to sequences.
                gradient.set_shape(source.shape)
        return results, found[: len(variables)], found[len(variables) :]

    def over_pieces(self, piece: Piece, batch_size: Any, count: Any, state: list[Any]) -> Outcome:
        weights, values = self.model.trainable_weights, [tf.convert_to_tensor(v) for v in state]
        outcome = over_pieces(piece, batch_size, count, values, self.static, overwritten(weights))
        pieces = number_of_pieces(batch_size, count, self.static)
        outcome.gradients = finished(
            outcome.gradients, [v._value for v in weights], pieces, self.shared_rows, self.merged_rows
        )
        return outcome

    def over_parts(self, part: Piece, size: Any, count: Any, state: list[Any]) -> Outcome:
        if not isinstance(size, int):
            count = tf.minimum(tf.cast(count, tf.int64), tf.cast(size, tf.int64))
        # Run eagerly, a tape would hold what each part has made.
        with contextlib.nullcontext() if self._tape is None else self._tape.stop_recording():
            outcome = over_pieces(part, size, count, [tf.convert_to_tensor(v) for v in state], self.static)
        outcome.gradients = finished(outcome.gradients, [v._value for v in self.model.trainable_weights])
        return outcome

    def take(self, data: Any, start: Any, size: Any) -> Any:
        return take(data, start, size, self.from_host)

    def pick(self, data: Any, samples: Sequence[int]) -> Any:
        return pick(data, samples)

    def samples_for_keras(self, x: Any) -> Any:
        return tf.shape(first_tensor(x))[0]

    def metrics_see_masks(self, training: bool) -> bool:
        return True

    def opened(self, rows: list[Any]) -> list[Any]:
        return [tf.raw_ops.PlaceholderWithDefault(input=row, shape=[None, *row.shape[1:]]) for row in rows]

    def sized(self, rows: list[Any], whole: Callable[[], list[Any]]) -> list[Any]:
        if tf.executing_eagerly() or all(row.shape.is_fully_defined() for row in rows):
            return rows
        with tf.__internal__.FuncGraph("sizes_of_rows").as_default(), self.scope():
            known = [tensor.shape for tensor in whole()]
        return [tf.ensure_shape(row, shape) for row, shape in zip(rows, known, strict=True)]

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
