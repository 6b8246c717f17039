"""What real batches show of a step: whether pieces of one give what pieces of other sizes do. Nothing is written."""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import Any

import numpy as np
from keras import ops, tree

from oomproof._backends.common import losses
from oomproof._backends.common.footprint import largest_output
from oomproof._backends.common.model import depends_on_data, has_own_state, may_mix, unpack
from oomproof._backends.common.phases import Phases
from oomproof._backends.common.predictions import tensors_in
from oomproof._backends.common.proof import Disagreement, disagreements, spread, summary
from oomproof._backends.common.proving import as_array, emulating, epsilon
from oomproof._backends.common.recompute import Recomputing
from oomproof._backends.pieces import largest_piece, piece_bounds, piece_count
from oomproof._compat.keras import get_stateless_scope
from oomproof._records.exactness import Exactness

# Samples whose predictions are looked at.
_SAMPLES = 5
# How many tensors as large as the largest a forward pass and its loss hold at once: scores, and what the loss makes.
_ALIVE = 4


class Looking(abc.ABC):
    """The part of a step that looks at batches."""

    model: Any
    engine: Recomputing
    _added_losses: dict[bool, tuple[str, ...]]

    @abc.abstractmethod
    def batch_size(self, data: Any) -> int: ...

    @abc.abstractmethod
    def evaluate(self, function: Callable[..., list[Any]], *arguments: Any) -> list[Any]: ...

    @abc.abstractmethod
    def _phases(self) -> Phases: ...

    @abc.abstractmethod
    def _forget_programs(self) -> None: ...

    def look(self, data: Any, pieces: int, again: bool = False, room: int | None = None) -> Exactness | None:
        if again and not self._added_losses[True] and not has_own_state(self.model):
            return None
        size = self.batch_size(data)
        if size < 2 or not depends_on_data(self.model, data):
            return None
        largest = largest_piece(size, pieces)
        # Smaller ones with other borders: both halves of a piece may be alike. And larger ones, since what a layer does
        # may begin with so many samples: the forward pass of two pieces mostly takes no more than a step of one.
        together = min(2 * largest, size)
        if room is not None:
            together = min(together, room // max(_ALIVE * largest_output(self.model, 1), 1))
        two = self.engine.take(data, 0, max(together, 1))
        looks = [("smaller", data, pieces, piece_count(size, (2 * largest + 1) // 3)), ("larger", two, 2, 1)]
        if largest == 1:
            looks[0] = "larger", data, pieces, pieces // 2
        for which, samples, count, other in looks:
            if count == other or (which == "larger" and together <= largest):
                continue
            found = self._forward_disagreements(samples, count, other)
            if found and losses.UNDECIDED in self._added_losses[True]:
                # Not means, then: what were zeros before may be sums.
                self._decide("sum")
                found = self._forward_disagreements(samples, count, other)
            if found:
                return Exactness("not exact", (f"pieces give another loss than {which} ones: {summary(found)}",))
        if losses.UNDECIDED in self._added_losses[True]:
            reason = "a loss given to add_loss was zero so far, which does not tell whether it is a mean or a sum"
            return Exactness("not exact", (reason,))
        return None

    def _decide(self, kind: str) -> None:
        for training, kinds in self._added_losses.items():
            self._added_losses[training] = tuple(kind if k == losses.UNDECIDED else k for k in kinds)
        self._forget_programs()

    def _forward_disagreements(self, data: Any, pieces: int, others: int) -> tuple[Disagreement, ...]:
        with emulating(self.engine):
            asked, made = self._forward_values(data, pieces), self._forward_values(data, others)
        return disagreements(asked, made, (), {}, epsilon(self.model, self.engine))

    def _forward_values(self, data: Any, pieces: int) -> dict[str, Any]:
        """What the forward pass of a training step in pieces writes and logs."""
        phases = self._phases()
        phases.differentiates = False
        names: list[str] = []

        def compute(data: Any) -> list[Any]:
            _, logs = phases.split(data, pieces, True)
            found = {f"log {index}": log for index, log in enumerate(tree.flatten(logs))}
            found |= {variable.path: value for variable, value in get_stateless_scope().pending()}
            names[:] = found
            return [ops.convert_to_tensor(value) for value in found.values()]

        values = self.evaluate(compute, data)
        return {name: as_array(value) for name, value in zip(names, values, strict=True)}

    def look_at_predictions(self, data: Any) -> Exactness | None:
        """Compares what a few samples are predicted to be together and apart; `None` if nothing differs."""
        few = self.engine.pick(data, spread(self.batch_size(data), _SAMPLES))
        samples = self.batch_size(few)
        if samples < 2 or not may_mix(self.model):
            return None
        whole = self._predicted(few)
        parts = [self._predicted(self.engine.take(few, a, b - a)) for a, b in piece_bounds(samples, 2)]
        apart = {name: np.concatenate([part[name] for part in parts]) for name in whole if whole[name].ndim}
        alike = {name: whole[name] for name in apart}
        found = disagreements(alike, apart, (), {}, epsilon(self.model, self.engine))
        reason = f"predictions of pieces are not those of the whole batch: {summary(found)}"
        return Exactness("not exact", (reason,)) if found else None

    def _predicted(self, data: Any) -> dict[str, Any]:
        outputs = self._outputs_of(data)
        return {f"output {i + 1}": as_array(output) for i, output in enumerate(outputs)}

    def _outputs_of(self, data: Any) -> list[Any]:
        """Outputs as in inference."""

        def compute(data: Any) -> list[Any]:
            return self.engine.run(lambda: (None, tensors_in(self.engine.call(unpack(data)[0], False))))

        return self.evaluate(compute, data)
