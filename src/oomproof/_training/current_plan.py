"""The plan in force: the one place that knows how batches are run now."""

from __future__ import annotations

import dataclasses

from oomproof._records.exactness import Exactness
from oomproof._records.plan import Plan
from oomproof._records.run import Phase
from oomproof._training.settings import Settings

# How a batch is run, as far as proofs go: whether it is cut, the segments that are recomputed, and where a head begins
# that is in parts.
Way = tuple[bool, tuple[str, ...], str | None]


class CurrentPlan:
    """How batches are run now, and what was proven of it.

    What a piece needs is counted against its volume, the bytes of its samples, rather than their number: batches of
    sequences padded to different lengths then share what was learned.

    Args:
        settings: What the user asked for. A plan among it is followed from the beginning.

    Attributes:
        recompute: Segments that are computed again in the backward pass.
        head: Where the head begins and into how many parts it is cut, if it is.
        lean: Whether updates are applied variable by variable.
        volumes: By phase, the most bytes of samples a piece may have. Without an entry there is no limit yet.
        may_grow: The phases whose pieces may be made larger.
        proofs: What was proven of each way batches were run in.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._followed: Plan | None = None
        self._unit = 1
        self.recompute: tuple[str, ...] = ()
        self.head: tuple[str, int] | None = None
        self.lean = settings.start is not None and settings.start.lean_commit
        self.volumes: dict[Phase, int] = {}
        self.may_grow: set[Phase] = set()
        self.proofs: dict[Way, Exactness] = {}

    @property
    def is_made(self) -> bool:
        """Whether a plan was made, or given, that changes how batches are run."""
        return self._followed is not None

    def follow(self, plan: Plan, unit: int) -> bool:
        """Takes over a plan for samples of `unit` bytes; returns whether that changes anything."""
        changed = (plan.recompute, plan.head_in_parts) != (self.recompute, self.head)
        self.recompute, self.head = plan.recompute, plan.head_in_parts
        self.lean |= plan.lean_commit
        if plan.micro_batch_size is not None and self._settings.start is None:
            volume = plan.micro_batch_size * unit
            changed |= volume < self.volumes.get("train", volume + 1)
            self.volumes["train"] = volume
        if changed:
            self._followed = plan
        return changed

    def trains(self, unit: int) -> None:
        """Notes the bytes of a sample, by which `record` tells how many samples a piece may hold."""
        self._unit = unit

    def micro_batch_size(self, phase: Phase, unit: int) -> int | None:
        """Samples of `unit` bytes that a piece may hold at most, or `None` for no limit."""
        volume = self.volumes.get(phase)
        limits = [] if volume is None else [max(1, volume // unit)]
        if phase == "train":
            limits += [self._settings.micro_batch_size] if self._settings.micro_batch_size else []
            start = self._settings.start
            limits += [start.micro_batch_size] if start and start.micro_batch_size and volume is None else []
        return min(limits, default=None)

    @property
    def changes_whole_batches(self) -> bool:
        """Whether batches that are not cut are run in another way than Keras's, too."""
        return bool(self.recompute) or self.head is not None

    def way(self, pieces: int, size: int = 2) -> Way:
        """How a batch of so many samples is run. Of one sample there are no parts."""
        return pieces > 1, self.recompute, self.head[0] if self.head is not None and size > 1 else None

    def record(self) -> Plan:
        """The plan as users get it."""
        micro = self.micro_batch_size("train", self._unit)
        made = self._followed or self._of_the_model()
        if made.micro_batch_size != micro:
            # Its figures are no longer those of what runs.
            made = dataclasses.replace(made, predicted=None, relative_time=None, alternatives=())
        exactness = self.proofs.get(self.way(1 if micro is None else 2))
        why = () if exactness is None or exactness.holds else exactness.why
        return dataclasses.replace(
            made,
            micro_batch_size=micro,
            recompute=self.recompute,
            head=None if self.head is None else self.head[0],
            head_parts=1 if self.head is None else self.head[1],
            lean_commit=self.lean,
            caveats=tuple(dict.fromkeys([*why, *(made.caveats if made.precision else ())])),
            exactness=exactness,
        )

    def _of_the_model(self) -> Plan:
        """What a plan that was given changes about the model, and nothing about its batches."""
        start = self._settings.start
        if start is None or not start.changes_model:
            return Plan()
        caveats = start.caveats if start.precision else ()
        return Plan(precision=start.precision, jit_compile=start.jit_compile, caveats=caveats)
