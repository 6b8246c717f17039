"""What a transactional step knows of its model, on every backend. How it runs is each backend's own."""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from keras import ops, tree

from oomproof._backends.common import losses, statistics
from oomproof._backends.common.batch import batch_leaves, symbolic
from oomproof._backends.common.draws import Draw, DrawTable, Rows, table_of
from oomproof._backends.common.fingerprint import Fingerprint
from oomproof._backends.common.head import check_head
from oomproof._backends.common.looking import Looking
from oomproof._backends.common.model import (
    draws_numbers,
    first_tensor,
    has_fixed_batch,
    has_known_sizes,
    layers,
    losses_stream,
    mixing_losses,
    statistics_caveat,
    statistics_layers,
    unpack,
)
from oomproof._backends.common.phases import Phases
from oomproof._backends.common.predictions import check_order, check_rows, check_sizes
from oomproof._backends.common.proof import spread
from oomproof._backends.common.proving import StepValues, proven
from oomproof._backends.common.recompute import Recomputing
from oomproof._backends.common.segments import resolved
from oomproof._backends.common.unbuilt import left_unbuilt
from oomproof._backends.pieces import piece_bounds
from oomproof._compat.keras import compute_output_spec, get_stateless_scope, standardize_dtype
from oomproof._records.exactness import Exactness
from oomproof._records.run import Phase
from oomproof._records.units import tensor_bytes
from oomproof.errors import UnsupportedModelError

# How many samples it takes to see how a loss from `add_loss` splits.
_EXAMINED = 5


class ModelStep(Looking):
    """The part of a step that is the same on every backend: what a batch is, and what cutting it would change."""

    # Bytes not to be exceeded, for backends that know what a program needs before it runs.
    budget: int | None = None
    failure: Exception | None = None
    tries_are_cheap = False
    searches_kernels = False
    fingerprint: Fingerprint | None = None
    traces_hold_variables = False
    # Whether Keras builds the optimizer, slots and all, before it evaluates.
    evaluating_builds_optimizer = True

    @property
    def batches_on_device(self) -> int:
        return 0

    def settle(self) -> None:
        """Put in place by the driver."""

    def wait_for_pending(self, everything: bool) -> Sequence[Any]:
        return ()  # Steps are done when they return, where a backend does not say otherwise.

    def __init__(self, model: Any, engine: Recomputing) -> None:
        self.model = model
        self.engine = engine
        self._examined = False
        self._fixed_batch: bool | None = None
        # Until a look at the data says otherwise.
        self._uses_statistics = True
        self._added_losses: dict[bool, tuple[str, ...]] = {True: (), False: ()}
        self._nothing_to_count: set[bool] = set()

    @property
    def recompute(self) -> tuple[str, ...]:
        """Segments that are computed again in the backward pass."""
        return self.engine.recompute

    @recompute.setter
    def recompute(self, segments: Sequence[str]) -> None:
        if self.model.built:
            resolved(self.model, segments)
        if tuple(segments) != self.engine.recompute:
            self.engine.recompute = tuple(segments)
            self._forget_programs()

    @property
    def head(self) -> tuple[str, int] | None:
        """Label of the first call of the head and into how many parts it is cut; `None` runs it with the rest."""
        return self.engine.head

    @head.setter
    def head(self, head: tuple[str, int] | None) -> None:
        if head is not None and self.model.built:
            check_head(self.model, head, self.engine.recompute)
        if head != self.engine.head:
            self.engine.head = head
            self._forget_programs()

    def in_pieces(self, pieces: int, training: bool = True) -> bool:
        """Whether a batch is put together from pieces, or parts of its head."""
        return pieces > 1 or (training and self.engine.head is not None)

    def _forget_programs(self) -> None:
        """Lets go of what was traced or compiled for other segments."""

    def as_traced(self) -> contextlib.AbstractContextManager[None]:
        """Around whatever is traced: the model as it was when this step was made for it, as Keras keeps its traces."""
        return contextlib.nullcontext() if self.fingerprint is None else self.fingerprint.in_force()

    def trace_key(self, phase: Phase, data: Any, spec: Any) -> Any:
        return None

    def evaluate(self, function: Callable[..., list[Any]], *arguments: Any) -> list[Any]:
        """Tensors that a function computes on real data, in a scope whose writes are thrown away."""
        with self.as_traced(), self.engine.scope():
            return function(*arguments)

    def _phases(self) -> Phases:
        return Phases(self.model, self.engine, self._added_losses, nothing_to_count=self._nothing_to_count)

    # What a batch is

    def prepare(self, data: Any, phase: Phase) -> None:
        model = self.model
        if phase == "predict":
            if not all(layer.built for layer in layers(model)):
                x, _, _ = unpack(tree.map_structure(symbolic, data))
                compute_output_spec(model, x, training=False)
            return
        optimizer = model.optimizer if phase == "train" or self.evaluating_builds_optimizer else None
        try:
            with contextlib.nullcontext() if optimizer is model.optimizer else left_unbuilt(model.optimizer):
                model._symbolic_build(data_batch=tree.map_structure(symbolic, data))
        except ValueError as error:
            # All losses come from `add_loss`, which Keras does not collect while it builds.
            if "No loss to compute" not in str(error):
                raise
            if optimizer is not None and not optimizer.built:
                optimizer.build(model.trainable_variables)

    def batch_size(self, data: Any) -> int:
        return int(self.engine.size_of(first_tensor(unpack(data)[0])))

    def sample_bytes(self, data: Any) -> int:
        return max(1, sum(self.bytes_of(leaf) for leaf in batch_leaves(data)) // max(self.batch_size(data), 1))

    def bytes_of(self, leaf: Any) -> int:
        return tensor_bytes(tuple(leaf.shape), standardize_dtype(leaf.dtype))

    def splittable(self, data: Any) -> bool:
        leaves = batch_leaves(data)
        if self._fixed_batch is None:
            self._fixed_batch = has_fixed_batch(self.model)
        if self._fixed_batch:
            return False
        return all(len(leaf.shape) for leaf in leaves) and len({int(self.engine.size_of(leaf)) for leaf in leaves}) == 1

    def loss(self, data: Any, pieces: int) -> float:
        """The loss of a batch as in evaluation. Writes nothing."""
        self._learn_draws(data, training=False)
        phases, tracker = self._phases(), self.model._loss_tracker

        def compute(data: Any) -> list[Any]:
            for variable in tracker.variables:
                # From zero, so that the tracker holds the loss of this batch alone.
                variable.assign(ops.zeros_like(variable.value))
            _ = phases.split(data, pieces, False) if pieces > 1 else phases.whole(data, False)
            return [v.value for v in tracker.variables]

        total, count = self.evaluate(compute, data)
        return float(total) / float(count)

    # Knowing the model

    def _examine(self, data: Any) -> None:
        """Finds out once, on a few real samples, how what the model computes goes together when a batch is cut."""
        if self._examined:
            return
        for training in (True, False):
            self._learn_draws(data, training)
        few = self.engine.pick(data, spread(self.batch_size(data), _EXAMINED))
        for training in (True, False):
            self._added_losses[training] = tuple(self._kinds_of_losses(few, training))
        self._uses_statistics = bool(statistics_layers(self.model)) and self._normalises(few)
        even = self.batch_size(few) // 2 * 2
        if even and not (losses_stream(self.model) and has_known_sizes(self.model)):
            self._check_outputs(self.engine.take(few, 0, even), even)
        self._examined = True

    @property
    def learnt(self) -> dict[str, Any]:
        """All of it, as JSON, to be kept for the next run."""
        added = [list(self._added_losses[training]) for training in (True, False)]
        return {"added": added, "draws": self.draws.to_dict(), "uses_statistics": self._uses_statistics}

    @learnt.setter
    def learnt(self, known: dict[str, Any]) -> None:
        self._added_losses.update(zip((True, False), map(tuple, known["added"]), strict=True))
        self.draws = DrawTable.from_dict(known["draws"])
        self._uses_statistics = bool(known["uses_statistics"])
        self._examined = True

    @property
    def draws(self) -> DrawTable:
        """Which random numbers belong to which sample. Setting it forgets programs that were made for another table."""
        return self.engine.draws

    @draws.setter
    def draws(self, table: DrawTable) -> None:
        if table != self.engine.draws:
            self.engine.draws = table
            self._forget_programs()

    def other_numbers(self, data: Any, training: bool = True) -> tuple[str, ...]:
        """Layers that draw other numbers in pieces of this batch than in the whole of it."""
        self._learn_draws(data, training)
        return self.engine.other_numbers()

    def _learn_draws(self, data: Any, training: bool) -> None:
        """Finds out once which random numbers belong to which samples, from calls on two numbers of samples."""
        if training in self.draws.learnt:
            return
        size = self.batch_size(data)
        if size < 2 or not draws_numbers(self.model):
            return
        first, second = (2, 3) if size > 2 else (1, 2)
        recorded = [self._recorded_draws(self.engine.take(data, 0, n), training) for n in (first, second)]
        # Programs of the other phase, made before, draw what they drew.
        self.draws.add(table_of(recorded[0], first, recorded[1], second, training))

    def _recorded_draws(self, data: Any, training: bool) -> list[Draw]:
        """Everything that a call of the model draws for this data."""

        def compute(data: Any) -> list[Any]:
            return self.engine.run(lambda: (self.engine.call(unpack(data)[0], training), []))

        with self.engine.recorded_draws() as found:
            self.evaluate(compute, data)
        return found

    def _added_by_layers(self, data: Any, training: bool, rows: Rows, moved: bool = False) -> list[float]:
        def compute(data: Any) -> list[Any]:
            scope = get_stateless_scope()
            if moved:
                scope.state_mapping.update({id(v): _moved(v) for v in self.model.trainable_variables})

            def forward() -> tuple[Any, list[Any]]:
                self.engine.call(unpack(data)[0], training)
                return None, [ops.sum(ops.cast(v, self.engine.wide)) for v in get_stateless_scope().losses]

            with self.engine.drawing(rows, whole=True):
                return self.engine.run(forward)

        return [float(value) for value in self.evaluate(compute, data)]

    def _kinds_of_losses(self, few: Any, training: bool) -> list[str]:
        samples = self.batch_size(few)
        bounds = [(0, samples), *piece_bounds(samples, min(3, samples))]
        for moved in (False, True):
            values = [
                self._added_by_layers(
                    self.engine.take(few, start, stop - start), training, Rows(start, stop - start, samples), moved
                )
                for start, stop in bounds
            ]
            if len({len(each) for each in values}) > 1:
                raise UnsupportedModelError(
                    f"The model's layers add {sorted({len(each) for each in values})} losses to batches of different "
                    "sizes. A batch of it cannot be cut. Have `call` add the same losses whatever it is given."
                )
            whole, *parts = values
            shares = [(stop - start) / samples for start, stop in bounds[1:]]
            kinds = [
                losses.added_loss_splits_as(whole[index], [part[index] for part in parts], shares)
                for index in range(len(whole))
            ]
            # A loss that is zero, as with weights that start at zero, says nothing yet: look at other weights.
            if losses.UNDECIDED not in kinds:
                break
        return kinds

    def _check_outputs(self, few: Any, samples: int) -> None:
        """A loss on all predictions wants them as the whole batch has them."""
        half = samples // 2
        parts = [few, self.engine.take(few, 0, half), self.engine.take(few, half, half)]
        shapes = self._shapes_of_outputs(few)
        if not has_known_sizes(self.model):
            check_sizes(shapes, self._shapes_of_outputs(parts[1]))
        if losses_stream(self.model) or all(tuple(shape[:1]) == (samples,) for shape in shapes):
            return
        whole, *halves = ([np.asarray(ops.convert_to_numpy(o)) for o in self._outputs_of(part)] for part in parts)
        check_rows(whole, samples)
        check_order(whole, halves)

    def _shapes_of_outputs(self, data: Any) -> list[tuple[int, ...]]:
        return [tuple(output.shape) for output in self._outputs_of(data)]

    def caveats(self) -> tuple[str, ...]:
        return statistics_caveat(self.model) if self._uses_statistics else ()

    def _normalises(self, few: Any) -> bool:
        """Whether statistics of the batch are used: a model may call layers that have them as in inference."""
        with statistics.recorded(statistics_layers(self.model)) as moments:
            self._recorded_draws(few, True)
        return bool(moments)

    # Proving it

    @abc.abstractmethod
    def step_values(self, data: Any, pieces: int) -> StepValues:
        """New values of a training step on a few samples, written nowhere."""

    def prove(self, data: Any, samples: int, cut: bool) -> Exactness:
        if cut and (why := self.odd_losses(data) + self.caveats()):
            return Exactness("not exact", why)
        return proven(self, data, samples, cut)

    def odd_losses(self, data: Any) -> tuple[str, ...]:
        """Losses given to `add_loss` that cannot be put together from pieces, in words."""
        self._examine(data)
        odd = [str(index + 1) for index, kind in enumerate(self._added_losses[True]) if kind == losses.NEITHER]
        reason = f"loss number {', '.join(odd)} given to add_loss is neither a mean nor a sum over samples"
        return (reason,) if odd else ()

    def notes(self) -> tuple[str, ...]:
        if losses_stream(self.model):
            return ()
        names = ", ".join(mixing_losses(self.model))
        return (
            f"loss {names} is computed on the whole batch's predictions: exact, at the cost of one more forward pass",
        )

    def resident(self) -> dict[str, int]:
        def size(variables: Sequence[Any]) -> int:
            return sum(tensor_bytes(tuple(v.shape), standardize_dtype(v.dtype)) for v in variables)

        model = self.model
        optimizer = [] if model.optimizer is None else list(model.optimizer.variables)
        return {
            "weights": size(model.variables),
            "optimizer": size(optimizer),
            "gradients": size(model.trainable_variables),
        }


def _moved(variable: Any) -> Any:
    noise = np.random.default_rng(0).normal(scale=0.1, size=tuple(variable.shape))
    return variable.value + ops.convert_to_tensor(noise, dtype=variable.dtype)
