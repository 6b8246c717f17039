"""What a driver is asked to do."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol

from oomproof._records.plan import Plan
from oomproof._records.run import Device

# (batch, device, bytes there are for model and step, caution) -> a plan, or `None` where nothing can be said.
Propose = Callable[[Any, Device, int, float], Plan | None]


class Proofs(Protocol):
    """What was proven in earlier runs."""

    def key(self, data: Any, cut: bool, recompute: tuple[str, ...], head: str | None) -> str | None:
        """A name for all that a proof depends on; `None` where not all of it can be told."""

    def recall(self, key: str) -> dict[str, Any] | None: ...

    def remember(self, key: str, facts: dict[str, Any]) -> None: ...


@dataclasses.dataclass(frozen=True)
class Settings:
    """What the user asked for.

    Attributes:
        budget: Bytes not to be exceeded, or `None` for what the device has.
        micro_batch_size: Samples to run at a time at most, or `None` to choose.
        may_split: Whether batches may be cut at all.
        exact_only: Refuse to cut where the result would not be exactly the same.
        start: The plan to begin with.
        propose: Makes a plan for a batch, or `None` to begin with the batch as it is.
        proofs: What was proven before, or `None` to prove everything anew.
    """

    budget: int | None = None
    micro_batch_size: int | None = None
    may_split: bool = True
    exact_only: bool = False
    start: Plan | None = None
    propose: Propose | None = None
    proofs: Proofs | None = None
