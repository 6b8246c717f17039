"""What happened in a run, and on which device."""

from __future__ import annotations

import dataclasses
from typing import Literal

from oomproof._records.exactness import Exactness
from oomproof._records.plan import Plan
from oomproof._records.record import Record
from oomproof._records.units import format_bytes

Phase = Literal["train", "test", "predict"]
EventKind = Literal["oom", "shrink", "grow", "commit-oom", "plan", "note"]


@dataclasses.dataclass(frozen=True)
class Device(Record):
    """The memory a framework can use on one device.

    Attributes:
        name: The framework's name for it, such as `"GPU:0"`.
        limit: Bytes its allocator can hand out, or `None` where that is unknown.
        measurable: Whether current use and peak can be read.
    """

    name: str
    limit: int | None
    measurable: bool

    def __str__(self) -> str:
        size = "limit unknown" if self.limit is None else format_bytes(self.limit)
        return f"{self.name}: {size}" + ("" if self.measurable else ", memory use cannot be measured")


@dataclasses.dataclass(frozen=True)
class Event(Record):
    """Something that memory, or the lack of it, made happen.

    Attributes:
        kind: `"oom"` (a step ran out of memory), `"commit-oom"` (the update did), `"shrink"` (pieces were made smaller
            before anything failed), `"grow"`, `"plan"` (the sizes that a run starts with) or `"note"`.
        phase: `"train"`, `"test"` or `"predict"`.
        epoch: Epoch, counted from 0, or `None` outside of `fit`.
        step: Steps of this phase that were finished before.
        batch_size: Samples in the logical batch.
        before: Samples in the largest piece before the event.
        after: Samples in the largest piece after it, or `None` where no smaller one was left.
        needed: Bytes that the failed step needed, where known.
        free: Bytes that were free for it, where known.
        seconds: Time lost to the failed attempt.
        message: The line that was logged.
    """

    kind: EventKind
    phase: Phase
    epoch: int | None
    step: int
    batch_size: int
    before: int | None
    after: int | None
    needed: int | None
    free: int | None
    seconds: float
    message: str

    def __str__(self) -> str:
        return self.message


@dataclasses.dataclass(frozen=True)
class Run(Record):
    """What happened in one `fit`, `evaluate` or `predict`.

    Attributes:
        backend: The Keras backend.
        versions: Versions of oomproof, Keras and the framework.
        device: The device it ran on.
        budget: The budget in bytes, or `None`.
        plan: The plan at the end of training.
        steps: Finished logical batches, by phase.
        peak: Largest device memory use that was measured, in bytes, or `None`.
        seconds: Wall time.
        events: What happened, in order.
        host_peak: Largest RAM use of this process and its children that was seen between steps, or `None`.
        exactness: How the training relates to the same training with unlimited memory.
    """

    backend: str
    versions: dict[str, str]
    device: Device
    budget: int | None
    plan: Plan
    steps: dict[str, int]
    peak: int | None
    seconds: float
    events: tuple[Event, ...] = ()
    host_peak: int | None = None
    exactness: Exactness = dataclasses.field(default_factory=Exactness)

    @property
    def ooms(self) -> int:
        """How many attempts ran out of memory."""
        return sum(event.kind in ("oom", "commit-oom") for event in self.events)

    def __str__(self) -> str:
        steps = ", ".join(f"{count} {phase}" for phase, count in self.steps.items() if count) or "none"
        lines = [
            f"{self.backend} on {self.device}",
            f"steps: {steps}; {self.seconds:.1f} s",
            f"plan: {self.plan.sentence if self.plan.alternatives else self.plan}",
            f"peak: {'not measured' if self.peak is None else format_bytes(self.peak)}"
            + ("" if self.budget is None else f" of a budget of {format_bytes(self.budget)}"),
            *([] if self.host_peak is None else [f"host memory: {format_bytes(self.host_peak)}"]),
            f"out of memory: {self.ooms} {'time' if self.ooms == 1 else 'times'}",
            *([f"training: {self.exactness}"] if self.steps.get("train") else []),
        ]
        return "\n".join(lines + [f"  {event}" for event in self.events])
