"""What the parts of a driver share: the step and its memory, the plan in force, what was measured, and the log.

What changes how batches are run is changed here, and noted.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NoReturn

from oomproof._backends.base import DeviceMemory, Shortage, Step
from oomproof._backends.pieces import largest_piece, piece_count
from oomproof._records.plan import Plan
from oomproof._records.run import EventKind, Phase
from oomproof._records.units import format_bytes
from oomproof._training import messages
from oomproof._training.allowance import Allowance
from oomproof._training.current_plan import CurrentPlan
from oomproof._training.piece_sizes import Evidence
from oomproof._training.run_log import RunLog
from oomproof._training.settings import Settings


@dataclasses.dataclass(frozen=True)
class Batch:
    """A logical batch: `size` samples of `unit` bytes each."""

    phase: Phase
    data: Any
    spec: Any
    size: int
    unit: int

    @property
    def bytes(self) -> int:
        return self.size * self.unit

    def volume(self, pieces: int) -> int:
        """Bytes of the samples in its largest piece."""
        return largest_piece(self.size, pieces) * self.unit


@dataclasses.dataclass
class Measured:
    """What was measured in one phase.

    Attributes:
        evidence: Bytes by volume.
        quickest: The least seconds by pieces and volume.
        grown: Whether pieces were made larger last, and not smaller.
        changes: How often pieces got another size after the first epoch.
        regrets: How often pieces that were made larger had to be made smaller again.
        searched: Volumes whose first run is over, where that looks for kernels.
        retried: Volumes that were tried once more after a failure that measurements do not explain.
    """

    evidence: Evidence = dataclasses.field(default_factory=Evidence)
    grown: bool = False
    changes: int = 0
    regrets: int = 0
    searched: set[int] = dataclasses.field(default_factory=set)
    retried: set[int] = dataclasses.field(default_factory=set)
    quickest: dict[tuple[int, int], float] = dataclasses.field(default_factory=dict)


class Training:
    """One guarded model's batches, as they are run on one device.

    Args:
        step: Runs a batch.
        memory: The device's.
        settings: What the user asked for.
        log: Where it is told what happens.

    Attributes:
        allowance: The memory there is for it.
        current: The plan in force.
        measured: What was measured, by phase.
        measuring_failed: Whether small batches could not be run, for a reason other than memory. That is told once.
        last_error: The framework's own error behind the last one that was raised.
    """

    def __init__(self, step: Step, memory: DeviceMemory, settings: Settings, log: RunLog) -> None:
        self.step = step
        self.memory = memory
        self.settings = settings
        self.log = log
        self.allowance = Allowance(memory, settings.budget)
        self.current = CurrentPlan(settings)
        self.measured: dict[Phase, Measured] = {"train": Measured(), "test": Measured(), "predict": Measured()}
        self.measuring_failed = False
        self.last_error: Exception | None = None

    def batch(self, phase: Phase, data: Any, spec: Any) -> Batch:
        return Batch(phase, data, spec, self.step.batch_size(data), self.step.sample_bytes(data))

    def pieces(self, batch: Batch) -> int:
        """Into how many pieces a batch is cut now."""
        micro = self.current.micro_batch_size(batch.phase, batch.unit)
        return piece_count(batch.size, micro, few_numbers=self.step.equal_pieces_only())

    def free(self) -> int | None:
        """Bytes that are free, or `None` where nobody knows."""
        return self.allowance.free() if self.allowance.measurable else None

    def held(self, batch: Batch) -> tuple[int, int, int]:
        """Bytes on the device that a plan counts, too: the model's, its optimizer's, and those of batches."""
        resident = self.step.resident()
        return resident["weights"], resident["optimizer"], self.step.batches_on_device * batch.bytes

    # Changes

    def follow(self, plan: Plan, batch: Batch) -> bool:
        """Runs batches as a plan says from here on; returns whether that changes anything."""
        if (plan.recompute, plan.head_in_parts) != (self.current.recompute, self.current.head):
            self._set(plan.recompute, plan.head_in_parts)
            # What was measured, and what failed, is another step.
            self.measured["train"].evidence = Evidence()
        return self.current.follow(plan, batch.unit)

    def _set(self, recompute: tuple[str, ...], head: tuple[str, int] | None) -> None:
        """Both or, where the model does not have what they name, none."""
        before = self.step.recompute, self.step.head
        try:
            self.step.head = None  # What is recomputed now may have been part of it.
            self.step.recompute = recompute
            self.step.head = head
        except BaseException:
            self.step.head = None
            self.step.recompute, self.step.head = before
            raise

    def note_plan(
        self, batch: Batch, kind: EventKind, plan: Plan, before: int, free: int | None, seconds: float = 0.0
    ) -> None:
        """Tells that a plan is followed; `before` is the largest piece until now."""
        message = plan.sentence if kind == "plan" else f"ran out of memory, so now {plan.sentence}; nothing lost"
        self.log.note(
            kind,
            batch.phase,
            batch.size,
            message,
            before=before,
            after=largest_piece(batch.size, self.pieces(batch)),
            needed=plan.predicted,
            free=free,
            seconds=seconds,
        )

    def resize(
        self,
        batch: Batch,
        kind: EventKind,
        volume: int,
        *,
        needed: int | None = None,
        free: int | None = None,
        seconds: float = 0.0,
    ) -> None:
        """Gives pieces another size."""
        before = largest_piece(batch.size, self.pieces(batch))
        measured = self.measured[batch.phase]
        measured.regrets += measured.grown and kind == "shrink"
        measured.grown = kind == "grow"
        measured.changes += bool(self.log.epoch)
        if kind != "grow":
            self.check_may_be_cut(batch)
        self.current.volumes[batch.phase] = volume
        pieces = self.pieces(batch)
        after = largest_piece(batch.size, pieces)
        what = "batch" if batch.phase == "train" else f"{batch.phase} batch"
        how = "whole" if pieces == 1 else f"as {pieces} × {after}"
        how += {
            "shrink": ", in smaller pieces",
            "grow": ", no longer cut" if pieces == 1 else ", in larger pieces",
        }.get(kind, "")
        message = f"{what} {batch.size} now runs {how}: {_reason(kind, needed, free, before == batch.size)}; "
        message += f"step {self.log.steps[batch.phase]}, nothing lost"
        self.log.note(
            kind,
            batch.phase,
            batch.size,
            message,
            before=before,
            after=after,
            needed=needed,
            free=free,
            seconds=seconds,
        )

    def go_lean(self, batch: Batch, kind: EventKind, free: int | None, seconds: float) -> None:
        """Applies updates variable by variable from here on."""
        self.current.lean = True
        room = "" if free is None else f" ({format_bytes(free)} free)"
        message = (
            f"too little memory for the optimizer's update{room}: weights are now updated in place, one at a time, "
            f"with a copy on the host; step {self.log.steps[batch.phase]}, nothing lost"
        )
        size = largest_piece(batch.size, self.pieces(batch))
        self.log.note(kind, batch.phase, batch.size, message, before=size, after=size, free=free, seconds=seconds)

    # What cannot be done

    def check_may_be_cut(self, batch: Batch) -> None:
        if not self.step.splittable(batch.data):
            raise messages.batch_cannot_be_cut(batch.size)
        if not self.settings.may_split:
            raise messages.cutting_is_not_allowed(batch.size)

    def give_up(self, batch: Batch, pieces: int, shortage: Shortage, free: int | None, seconds: float) -> NoReturn:
        size = largest_piece(batch.size, pieces)
        what = "The optimizer's update" if shortage.where == "commit" else f"A piece of {size} of {batch.size} samples"
        message = f"giving up: {what[0].lower()}{what[1:]} does not fit"
        self.log.note("oom", batch.phase, batch.size, message, before=size, free=free, seconds=seconds)
        self.last_error = shortage.error
        splittable, resident = self.step.splittable(batch.data), self.step.resident()
        raise messages.gave_up(
            what, self.allowance.device, free, self.allowance.limit, splittable, resident, shortage.text
        ) from shortage.error


def _reason(kind: EventKind, needed: int | None, free: int | None, was_whole: bool) -> str:
    """Why a batch runs in other pieces than before, with the numbers that are known."""
    room = "an unknown amount free" if free is None else f"{format_bytes(free)} free"
    if kind == "grow":
        return room
    if needed is None:
        return f"ran out of memory, {room}"
    if kind == "plan":
        if not was_whole:
            return f"as planned it would need {format_bytes(needed)}, too much to be safe with {room}"
        return f"whole it would need {format_bytes(needed)}, {room}"
    return f"{'needed' if kind == 'oom' else 'would need'} {format_bytes(needed)}, {room}"
