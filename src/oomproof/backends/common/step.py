"""What a transactional step knows of its model, on every backend. How it runs is each backend's own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
from keras import ops, tree
from keras.src import backend as keras_backend
from keras.src.backend.common.stateless_scope import get_stateless_scope

from oomproof.backends.common import losses
from oomproof.backends.common.model import (
    first_tensor,
    layers,
    losses_stream,
    mixing_losses,
    overrides,
    statistics_layers,
    unpack,
)
from oomproof.backends.common.phases import Phases
from oomproof.backends.common.recompute import Recomputing
from oomproof.backends.common.stretches import resolved
from oomproof.errors import UnsupportedModelError
from oomproof.records import Phase
from oomproof.units import tensor_bytes

# How many samples it takes to see how a loss from `add_loss` splits.
_EXAMINED = 4


class ModelStep:
    """The part of a step that is the same on every backend: what a batch is, and what cutting it would change."""

    # Bytes not to be exceeded, for backends that know what a program needs before it runs.
    budget: int | None = None
    failure: Exception | None = None
    tries_are_cheap = False

    @property
    def batches_on_device(self) -> int:
        return 0

    def settle(self) -> None:
        """Put in place by the driver."""

    def land(self, everything: bool) -> Sequence[Any]:
        return ()  # Steps are done when they return, where a backend does not say otherwise.

    def __init__(self, model: Any, engine: Recomputing) -> None:
        self.model = model
        self.engine = engine
        self._examined = False
        self._added_losses: dict[bool, tuple[str, ...]] = {True: (), False: ()}
        self._odd_losses: set[str] = set()
        self._nothing_to_count: set[bool] = set()

    @property
    def recompute(self) -> tuple[str, ...]:
        """Stretches that are computed again in the backward pass."""
        return self.engine.recompute

    @recompute.setter
    def recompute(self, stretches: Sequence[str]) -> None:
        if self.model.built:
            resolved(self.model, stretches)
        if tuple(stretches) != self.engine.recompute:
            self.engine.recompute = tuple(stretches)
            self._forget_programs()

    def _forget_programs(self) -> None:
        """Lets go of what was traced or compiled for other stretches."""

    def evaluate(self, function: Callable[..., list[Any]], *arguments: Any) -> list[Any]:
        """Tensors that a function computes on real data, in a scope whose writes are thrown away."""
        with self.engine.scope():
            return function(*arguments)

    def _phases(self) -> Phases:
        return Phases(self.model, self.engine, self._added_losses, nothing_to_count=self._nothing_to_count)

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
        return int(self.engine.size_of(first_tensor(unpack(data)[0])))

    def sample_bytes(self, data: Any) -> int:
        return max(1, sum(self.bytes_of(leaf) for leaf in batch_leaves(data)) // max(self.batch_size(data), 1))

    def bytes_of(self, leaf: Any) -> int:
        return tensor_bytes(tuple(leaf.shape), keras_backend.standardize_dtype(leaf.dtype))

    def splittable(self, data: Any) -> bool:
        leaves = batch_leaves(data)
        return all(len(leaf.shape) for leaf in leaves) and len({int(self.engine.size_of(leaf)) for leaf in leaves}) == 1

    # Gradients and losses of a batch by themselves

    def gradients(self, data: Any, pieces: int) -> tuple[float, list[Any]]:
        """Loss and gradients as dense arrays, unscaled. Writes nothing."""
        self._examine(data)
        loss, found, scale = self._loss_and_gradients(data, pieces, training=True)
        return loss, [None if g is None else np.array(ops.convert_to_numpy(g)) / scale for g in found]

    def loss(self, data: Any, pieces: int) -> float:
        """The loss of a batch as in evaluation. Writes nothing."""
        return self._loss_and_gradients(data, pieces, training=False)[0]

    def _loss_and_gradients(self, data: Any, pieces: int, training: bool) -> tuple[float, Sequence[Any], float]:
        phases, tracker = self._phases(), self.model._loss_tracker

        def compute(data: Any) -> list[Any]:
            for variable in tracker.variables:
                # From zero, so that the tracker holds the loss of this batch alone.
                variable.assign(ops.zeros_like(variable.value))
            found, _ = phases.split(data, pieces, training) if pieces > 1 else phases.whole(data, training)
            return [*(v.value for v in tracker.variables), phases.loss_scale(), *found]

        total, count, scale, *found = self.evaluate(compute, data)
        return float(total) / float(count), found, float(scale)

    # Knowing the model

    def _examine(self, data: Any) -> None:
        """Finds out once, on a few real samples, how losses behave when a batch is cut."""
        if self._examined:
            return
        samples = min(_EXAMINED, self.batch_size(data)) // 2 * 2
        few = self.engine.take(data, 0, max(samples, 1))
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

    def _added_by_layers(self, data: Any, training: bool, moved: bool = False) -> list[float]:
        def compute(data: Any) -> list[Any]:
            scope = get_stateless_scope()
            if moved:
                scope.state_mapping.update({id(v): _moved(v) for v in self.model.trainable_variables})

            def forward() -> tuple[Any, list[Any]]:
                self.engine.call(unpack(data)[0], training)
                return None, [ops.sum(ops.cast(v, self.engine.wide)) for v in get_stateless_scope().losses]

            return self.engine.run(forward)

        return [float(value) for value in self.evaluate(compute, data)]

    def _kinds_of_losses(self, few: Any, samples: int, training: bool, whole: list[float]) -> list[str | None]:
        if not whole or samples < 2:
            return ["mean"] * len(whole)
        half = samples // 2
        parts = [few, self.engine.take(few, 0, half), self.engine.take(few, half, half)]
        # A loss that is zero, as with weights that start at zero, says nothing yet: look at other weights.
        moved = not all(whole)
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


def batch_leaves(data: Any) -> list[Any]:
    return [leaf for leaf in tree.flatten(data) if leaf is not None]


def _moved(variable: Any) -> Any:
    noise = np.random.default_rng(0).normal(scale=0.1, size=tuple(variable.shape))
    return variable.value + ops.convert_to_tensor(noise, dtype=variable.dtype)


def _symbolic(leaf: Any) -> Any:
    if leaf is None:
        return None
    shape = tuple(leaf.shape)
    return keras.KerasTensor((None, *shape[1:]) if shape else shape, keras_backend.standardize_dtype(leaf.dtype))
