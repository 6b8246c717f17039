"""What `verify` returns."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from oomproof._records.exactness import Exactness
from oomproof._records.record import Record


@dataclasses.dataclass(frozen=True)
class Difference(Record):
    """How far the micro-batched gradient of one variable is from the full-batch one."""

    variable: str
    absolute: float
    relative: float


@dataclasses.dataclass(frozen=True)
class Verification(Record):
    """The outcome of `verify`: is a micro-batched step the same as a full-batch one for this model?

    Attributes:
        exactness: What training in such pieces is, judged by everything a step writes: weights, optimizer state,
            statistics and logs.
        batch_size: Samples that were compared.
        micro_batch_size: Samples in the largest piece.
        tolerance: Largest relative difference that counts as rounding.
        loss: Relative difference of the loss.
        differences: Difference of each variable, largest first.
        culprits: What breaks exactness; empty where nothing does.
        notes: What is worth knowing but breaks nothing.
    """

    exactness: Exactness
    batch_size: int
    micro_batch_size: int
    tolerance: float
    loss: float
    differences: tuple[Difference, ...]
    culprits: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    _derived: ClassVar = ("exact",)

    @property
    def exact(self) -> bool:
        """Whether pieces give the same result as the whole batch, up to rounding and including random numbers."""
        return self.exactness.word == "exact"

    def __bool__(self) -> bool:
        return self.exactness.holds

    def __str__(self) -> str:
        verdict = self.exactness if self.exactness.holds else "not exact"
        lines = [
            f"batch of {self.batch_size} in pieces of at most {self.micro_batch_size}: {verdict} "
            f"(tolerance {self.tolerance:.0e}, loss differs by {self.loss:.1e})"
        ]
        lines += [f"  broken by {culprit}" for culprit in self.culprits]
        lines += [f"  note: {note}" for note in self.notes]
        width = max((len(d.variable) for d in self.differences[:10]), default=0)
        lines += [
            f"  {d.variable:<{width}}  relative {d.relative:.1e}  absolute {d.absolute:.1e}"
            for d in self.differences[:10]
        ]
        if len(self.differences) > 10:
            lines.append(f"  … and {len(self.differences) - 10} variables with smaller differences")
        return "\n".join(lines)
