"""The transactional step on TensorFlow: a call that raises has changed nothing."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import tree
from keras.src import backend as keras_backend

from oomproof.backends.common import losses
from oomproof.backends.common.model import (
    call,
    first_tensor,
    layers,
    losses_stream,
    mixing_losses,
    statistics_layers,
    unpack,
)
from oomproof.backends.tensorflow.commit import commit_leanly
from oomproof.backends.tensorflow.phases import Phases
from oomproof.backends.tensorflow.pieces import batch_leaves, size_of, take
from oomproof.backends.tensorflow.writes import apply_gradients
from oomproof.records import Phase
from oomproof.units import tensor_bytes

# Takes hold of a variable before it writes to it and reads it afterwards, so its writes cannot wait.
_READS_WHAT_IT_WRITES: Any = getattr(keras.optimizers, "ScheduleFreeAdamW", ())
# How many samples it takes to see how a loss from `add_loss` splits.
_EXAMINED = 4


class TensorFlowStep:
    """Runs logical batches of one compiled model, whole or in pieces.

    Programs are traced when first used and kept; the number of pieces is an input in graph mode, so that it can
    change without a new trace, and a constant under XLA, which needs to know sizes.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self._eager = bool(model.run_eagerly)
        self._xla = bool(model.jit_compile) and not self._eager
        self._programs: dict[Any, Any] = {}
        self._traced: dict[Any, Any] = {}
        self._pending: dict[bool, list[Any]] = {}
        self._added_losses: tuple[str, ...] | None = None
        self._odd_losses: tuple[str, ...] = ()

    # What a batch is

    def prepare(self, data: Any, phase: Phase) -> None:
        model = self.model
        if phase == "predict":
            if not all(layer.built for layer in layers(model)):
                x, _, _ = unpack(tree.map_structure(_symbolic, data))
                keras_backend.compute_output_spec(model, x, training=False)
            return
        model._symbolic_build(data_batch=tree.map_structure(_symbolic, data))

    def batch_size(self, data: Any) -> int:
        return int(size_of(first_tensor(unpack(data)[0])))

    def sample_bytes(self, data: Any) -> int:
        return max(1, sum(_bytes_of(leaf) for leaf in batch_leaves(data)) // max(self.batch_size(data), 1))

    def splittable(self, data: Any) -> bool:
        leaves = batch_leaves(data)
        return all(leaf.shape.rank != 0 for leaf in leaves) and len({int(size_of(leaf)) for leaf in leaves}) == 1

    def equal_pieces_only(self) -> bool:
        return self._xla

    # Running it

    def train(self, data: Any, pieces: int, lean: bool, spec: Any = None) -> Any:
        if pieces > 1:
            self._examine(data)
        if not lean and not isinstance(self.model.optimizer, _READS_WHAT_IT_WRITES):
            return self._run("fused", data, pieces, spec)
        gradients, pending, logs = self._run("gradients", data, pieces, spec)
        commit_leanly(self.model, gradients, self._pending[pieces > 1], pending)
        return logs

    def test(self, data: Any, pieces: int, spec: Any = None) -> Any:
        if pieces > 1:
            self._examine(data)
        return self._run("test", data, pieces, spec)

    def predict(self, data: Any, pieces: int, spec: Any = None) -> Any:
        if pieces == 1:
            return self._run("predict", data, 1, spec)
        size = self.batch_size(data)
        parts = []
        for index in range(pieces):
            start = index * size // pieces
            piece = take(data, start, (index + 1) * size // pieces - start)
            # Straight to the host: the predictions of the whole batch need not be on the device at once.
            parts.append(tree.map_structure(_to_host, self._run("predict", piece, 1, None)))
        return tree.map_structure(lambda *leaves: _concat(leaves), *parts)

    def gradients(self, data: Any, pieces: int) -> tuple[float, list[Any]]:
        self._examine(data)
        phases = Phases(self.model, self._added_losses or (), static=False)
        split = pieces > 1
        tracker = self.model._loss_tracker
        # From zero, so that the tracker holds the loss of this batch alone.
        with phases.scope([(variable, tf.zeros_like(variable._value)) for variable in tracker.variables]) as scope:
            found, _ = phases.split(data, pieces, True) if split else phases.whole(data, True)
            total, count = (float(scope.get_current_value(variable)) for variable in tracker.variables)
            scale = float(phases.loss_scale())
        return total / count, [None if g is None else np.array(tf.convert_to_tensor(g)) / scale for g in found]

    def probe(self, data: Any, samples: int, phase: Phase) -> None:
        few = take(data, 0, samples)
        if phase != "predict":
            self._examine(data)
        self._run(
            {"train": "gradients", "test": "try test", "predict": "try predict"}[phase], few, 1, None, phase == "train"
        )

    # Programs

    def _run(self, kind: str, data: Any, pieces: int, spec: Any, split: bool = False) -> Any:
        split = split or pieces > 1
        if self._eager:
            return self._compute(kind, data, pieces, split)
        # XLA needs to know sizes: one program per number of pieces, traced for the sizes at hand.
        compiled_split = self._xla and split
        open_size = compiled_split and spec is not None and first_tensor(unpack(spec)[0]).shape[0] is None
        program = self._program(kind, split, pieces if self._xla else None, open_size)
        count = () if self._xla else (_constant(pieces),)
        if spec is None or compiled_split:
            return program(data, *count)
        # Looking a program up by its spec takes longer than a small step, so remember what was found.
        key = (program, id(spec))
        if key not in self._traced:
            self._traced[key] = (spec, program.get_concrete_function(spec, *count))
        return self._traced[key][1](data, *count)

    def _program(self, kind: str, split: bool, pieces: int | None, open_size: bool) -> Any:
        key = (kind, split, pieces, open_size)
        if key not in self._programs:

            def compute(data: Any, *count: Any) -> Any:
                return self._compute(kind, data, count[0] if count else pieces, split, open_size)

            relaxed = not (self._xla and split)
            self._programs[key] = tf.function(compute, reduce_retracing=relaxed, jit_compile=self._xla, autograph=False)
        return self._programs[key]

    def _compute(self, kind: str, data: Any, pieces: Any, split: bool, open_size: bool = False) -> Any:
        phases = Phases(self.model, self._added_losses or (), self._xla, open_size)
        with phases.scope() as scope:
            training = kind in ("fused", "gradients")
            gradients: Sequence[Any] = ()
            if "predict" in kind:
                logs = call(self.model, unpack(data)[0], False)
            elif split:
                gradients, logs = phases.split(data, pieces, training)
            else:
                gradients, logs = phases.whole(data, training)
            if kind == "fused" and gradients:
                apply_gradients(self.model.optimizer, gradients, self.model.trainable_weights, scope)
            if kind == "gradients":
                pending = scope.pending()
                self._pending[split] = [variable for variable, _ in pending]
                return list(gradients), [value for _, value in pending], logs
        if not kind.startswith("try"):
            scope.commit()
        return logs

    # Knowing the model

    def _examine(self, data: Any) -> None:
        """Finds out once, on a few real samples, how losses that layers add behave when a batch is cut."""
        if self._added_losses is not None:
            return
        samples = min(_EXAMINED, self.batch_size(data)) // 2 * 2
        few = take(data, 0, max(samples, 1))

        def added(data: Any, training: bool, moved: bool = False) -> list[Any]:
            phases = Phases(self.model, (), static=False)
            with phases.scope() as scope:
                if moved:
                    scope.state_mapping.update({id(v): _moved(v._value) for v in self.model.trainable_variables})
                call(self.model, unpack(data)[0], training)
            return [tf.reduce_sum(tf.cast(value, tf.float64)) for value in scope.losses]

        training = len(added(few, True)) != len(added(few, False))
        whole = added(few, training)
        if not whole or samples < 2:
            self._added_losses = ("mean",) * len(whole)
            return
        parts = [few, take(few, 0, samples // 2), take(few, samples // 2, samples // 2)]
        # A loss that is zero, as with weights that start at zero, says nothing yet: look at other weights.
        moved = not all(float(value) for value in whole)
        values = zip(*(added(part, training, moved) for part in parts), strict=True)
        kinds = [losses.added_loss_splits_as(*three) for three in values]
        self._odd_losses = tuple(str(index + 1) for index, kind in enumerate(kinds) if kind is None)
        self._added_losses = tuple(kind or "mean" for kind in kinds)

    def caveats(self) -> tuple[str, ...]:
        found = []
        if normalising := statistics_layers(self.model):
            names = ", ".join(layer.path or layer.name for layer in normalising[:3])
            more = f" and {len(normalising) - 3} more" if len(normalising) > 3 else ""
            found.append(f"BatchNormalization ({names}{more}) normalises with the statistics of each piece")
        if self._odd_losses:
            found.append(
                f"loss number {', '.join(self._odd_losses)} given to add_loss is neither a mean nor a sum over samples"
            )
        return tuple(found)

    def notes(self) -> tuple[str, ...]:
        if losses_stream(self.model):
            return ()
        names = ", ".join(mixing_losses(self.model))
        return (
            f"loss {names} is computed on the whole batch's predictions: exact, at the cost of one more forward pass",
        )

    def resident(self) -> dict[str, int]:
        def size(variables: Sequence[Any]) -> int:
            return sum(tensor_bytes(tuple(v.shape), keras_backend.standardize_dtype(v.dtype)) for v in variables)

        model = self.model
        optimizer = [] if model.optimizer is None else list(model.optimizer.variables)
        return {
            "weights": size(model.variables),
            "optimizer": size(optimizer),
            "gradients": size(model.trainable_variables),
        }


@functools.cache
def _constant(pieces: int) -> tf.Tensor:
    return tf.constant(pieces, tf.int64)


def _moved(weight: Any) -> Any:
    return weight + 0.1 * tf.random.stateless_normal(weight.shape, (1, 2), dtype=weight.dtype)


def _symbolic(leaf: Any) -> Any:
    if leaf is None:
        return None
    shape = tuple(leaf.shape)
    return keras.KerasTensor((None, *shape[1:]) if shape else shape, keras_backend.standardize_dtype(leaf.dtype))


def _bytes_of(leaf: Any) -> int:
    values = leaf.flat_values if isinstance(leaf, tf.RaggedTensor) else getattr(leaf, "values", leaf)
    return tensor_bytes(tuple(values.shape), values.dtype.name)


def _to_host(tensor: Any) -> Any:
    return tensor if isinstance(tensor, tf.RaggedTensor | tf.SparseTensor) else np.array(tensor)


def _concat(leaves: Sequence[Any]) -> Any:
    if isinstance(leaves[0], np.ndarray):
        with tf.device("CPU:0"):
            return tf.convert_to_tensor(np.concatenate(leaves, axis=0))
    if isinstance(leaves[0], tf.SparseTensor):
        return tf.sparse.concat(0, list(leaves))
    return tf.concat(list(leaves), axis=0)
