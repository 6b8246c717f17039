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
    overrides,
    statistics_layers,
    unpack,
)
from oomproof.backends.tensorflow.commit import commit_leanly
from oomproof.backends.tensorflow.phases import Phases
from oomproof.backends.tensorflow.pieces import batch_leaves, size_of, take
from oomproof.backends.tensorflow.writes import apply_gradients
from oomproof.errors import UnsupportedModelError
from oomproof.records import Phase
from oomproof.units import tensor_bytes

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
        self._specs: dict[str, Any] = {}
        self._pending: dict[bool, list[Any]] = {}
        self._examined = False
        self._added_losses: dict[bool, tuple[str, ...]] = {True: (), False: ()}
        self._odd_losses: set[str] = set()

    # What a batch is

    def prepare(self, data: Any, phase: Phase) -> None:
        model = self.model
        if phase == "predict":
            if not all(layer.built for layer in layers(model)):
                x, _, _ = unpack(tree.map_structure(_symbolic, data))
                keras_backend.compute_output_spec(model, x, training=False)
            return
        try:
            model._symbolic_build(data_batch=tree.map_structure(_symbolic, data))
        except ValueError as error:
            # All losses come from `add_loss`, which Keras does not collect while it builds.
            if "No loss to compute" not in str(error):
                raise
            if model.optimizer is not None and not model.optimizer.built:
                model.optimizer.build(model.trainable_variables)

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
        in_place = _writes_cannot_wait(self.model.optimizer)
        if not lean and not in_place:
            return self._run("fused", data, pieces, spec)
        gradients, pending, logs = self._run("gradients", data, pieces, spec)
        apply = self._apply
        if in_place and not lean and not self._eager:
            # Op by op takes the least memory; what must be in place anyway runs as Keras runs it.
            apply = self._programs.setdefault("apply", tf.function(self._apply, autograph=False))
        writes = list(zip(self._pending[pieces > 1], pending, strict=True))
        commit_leanly(self.model, gradients, writes, apply)
        return logs

    def _apply(self, gradients: list[Any]) -> None:
        self.model.optimizer.apply_gradients(zip(gradients, self.model.trainable_weights, strict=True))

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
            parts.append(tree.map_structure(_to_host, self._run("predict", piece, 1, self._open_spec(piece))))
        return tree.map_structure(lambda *leaves: _concat(leaves), *parts)

    def gradients(self, data: Any, pieces: int) -> tuple[float, list[Any]]:
        self._examine(data)
        loss, found, scale = self._eagerly(data, pieces, training=True)
        return loss, [None if g is None else np.array(tf.convert_to_tensor(g)) / scale for g in found]

    def loss(self, data: Any, pieces: int) -> float:
        """The loss of a batch as in evaluation. Writes nothing."""
        return self._eagerly(data, pieces, training=False)[0]

    def _eagerly(self, data: Any, pieces: int, training: bool) -> tuple[float, Sequence[Any], float]:
        phases = self._phases()
        tracker = self.model._loss_tracker
        # From zero, so that the tracker holds the loss of this batch alone.
        with phases.scope([(variable, tf.zeros_like(variable._value)) for variable in tracker.variables]) as scope:
            found, _ = phases.split(data, pieces, training) if pieces > 1 else phases.whole(data, training)
            total, count = (float(scope.get_current_value(variable)) for variable in tracker.variables)
            scale = float(phases.loss_scale())
        return total / count, found, scale

    def _phases(self, static: bool = False, open_size: bool = False) -> Phases:
        return Phases(self.model, self._added_losses, static, open_size)

    def probe(self, data: Any, samples: int, phase: Phase) -> None:
        few = take(data, 0, samples)
        if phase != "predict":
            self._examine(data)
        kind = {"train": "gradients", "test": "try test", "predict": "try predict"}[phase]
        self._run(kind, few, 1, self._open_spec(few), split=phase == "train")

    # Programs

    def _open_spec(self, data: Any) -> Any:
        """A spec with the batch size left open, so that pieces of all sizes share one trace; `None` if it cannot be."""
        if any(not isinstance(leaf, tf.Tensor) for leaf in batch_leaves(data)):
            return None
        spec = tree.map_structure(
            lambda leaf: None if leaf is None else tf.TensorSpec([None, *leaf.shape[1:]], leaf.dtype), data
        )
        return self._specs.setdefault(repr(spec), spec)

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
        phases = self._phases(self._xla, open_size)
        with phases.scope() as scope:
            training = kind in ("fused", "gradients")
            gradients: Sequence[Any] = ()
            if "predict" in kind:
                logs = call(self.model, unpack(data)[0], False)
            elif split:
                gradients, logs = phases.split(data, pieces, training)
            else:
                gradients, logs = phases.whole(data, training)
            # A metric may return its variable: what counts is the value that is pending.
            logs = tree.map_structure(lambda log: log.value if isinstance(log, keras.Variable) else log, logs)
            if kind == "fused" and gradients:
                apply_gradients(self.model.optimizer, gradients, self.model.trainable_weights, scope)
            if kind == "gradients":
                pending = scope.pending()
                self._pending[split] = [variable for variable, _ in pending]
                return list(gradients), [value for _, value in pending], logs
        if not kind.startswith("try"):
            # Logs too must be there before anything is written: they read what is pending.
            scope.commit(tree.flatten(logs))
        return logs

    # Knowing the model

    def _examine(self, data: Any) -> None:
        """Finds out once, on a few real samples, how losses behave when a batch is cut."""
        if self._examined:
            return
        samples = min(_EXAMINED, self.batch_size(data)) // 2 * 2
        few = take(data, 0, max(samples, 1))
        values = {training: self._added_by_layers(few, training) for training in (True, False)}
        same_number = len(values[True]) == len(values[False])
        for training in (True, False):
            # Without the randomness of training where that makes no other difference.
            kinds = self._kinds_of_losses(few, samples, training and not same_number, values[training])
            self._odd_losses |= {str(index + 1) for index, kind in enumerate(kinds) if kind is None}
            self._added_losses[training] = tuple(kind or "mean" for kind in kinds)
        self._examined = True
        if samples >= 2 and overrides(self.model, "compute_loss"):
            self._check_own_loss(few)

    def _added_by_layers(self, data: Any, training: bool, moved: bool = False) -> list[Any]:
        with self._phases().scope() as scope:
            if moved:
                scope.state_mapping.update({id(v): _moved(v._value) for v in self.model.trainable_variables})
            call(self.model, unpack(data)[0], training)
        return [tf.reduce_sum(tf.cast(value, tf.float64)) for value in scope.losses]

    def _kinds_of_losses(self, few: Any, samples: int, training: bool, whole: list[Any]) -> list[str | None]:
        if not whole or samples < 2:
            return ["mean"] * len(whole)
        parts = [few, take(few, 0, samples // 2), take(few, samples // 2, samples // 2)]
        # A loss that is zero, as with weights that start at zero, says nothing yet: look at other weights.
        moved = not all(float(value) for value in whole)
        values = zip(*(self._added_by_layers(part, training, moved) for part in parts), strict=True)
        return [losses.added_loss_splits_as(*three) for three in values]

    def _check_own_loss(self, few: Any) -> None:
        """An own `compute_loss` may use more than it is given, such as a tensor that `call` has kept."""
        whole, pieces = (self.loss(few, count) for count in (1, 2))
        if abs(whole - pieces) > 1e-3 * max(abs(whole), 1e-6):
            raise UnsupportedModelError(
                f"{type(self.model).__name__}.compute_loss gives {pieces:.6g} for predictions computed in pieces and "
                f"{whole:.6g} for the whole batch: it uses more than its arguments, perhaps a tensor that `call` kept. "
                "A batch of it cannot be cut. Return that tensor as an output, or use `add_loss` in the layer."
            )

    def caveats(self, data: Any) -> tuple[str, ...]:
        self._examine(data)
        found = []
        if normalising := statistics_layers(self.model):
            names = ", ".join(layer.path or layer.name for layer in normalising[:3])
            more = f" and {len(normalising) - 3} more" if len(normalising) > 3 else ""
            found.append(f"BatchNormalization ({names}{more}) normalises with the statistics of each piece")
        if self._odd_losses:
            numbers = ", ".join(sorted(self._odd_losses))
            found.append(f"loss number {numbers} given to add_loss is neither a mean nor a sum over samples")
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


def _writes_cannot_wait(optimizer: Any) -> bool:
    """ScheduleFreeAdamW takes hold of a variable before it writes to it and reads it afterwards."""
    kind = getattr(keras.optimizers, "ScheduleFreeAdamW", ())
    return isinstance(getattr(optimizer, "inner_optimizer", optimizer), kind)


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
