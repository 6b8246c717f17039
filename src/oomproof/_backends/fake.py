"""A device of N bytes and a step with known needs, for tests of everything above the backends. No framework.

Data is a list: one entry for each sample. A step needs `fixed + slope × largest piece` bytes, its update `update`
bytes more (a third of it when applied leanly), and a request that does not fit raises `FakeShortageError`.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from oomproof._backends.base import MemoryUse, Shortage
from oomproof._backends.pieces import largest_piece
from oomproof._records.exactness import Exactness
from oomproof._records.run import Device, Phase


class FakeShortageError(Exception):
    """What this device raises when it is full."""

    def __init__(self, where: Literal["step", "commit"]) -> None:
        super().__init__(f"out of fake memory in the {where}")
        self.where = where


@dataclasses.dataclass
class FakeMemory:
    """`resident` bytes are taken for good; tests change it to make memory scarce or plenty."""

    limit: int | None
    resident: int = 0
    measurable: bool = True
    peak: int = 0
    failures: int = 0
    advice: str = ""

    def describe(self) -> Device:
        return Device("FAKE:0", self.limit, self.measurable)

    def usage(self) -> MemoryUse | None:
        return MemoryUse(self.resident, max(self.peak, self.resident)) if self.measurable else None

    def reset_peak(self) -> None:
        self.peak = self.resident

    def release(self) -> None:
        pass

    def shortage(self, error: BaseException) -> Shortage | None:
        return Shortage(str(error), error.where, None, error) if isinstance(error, FakeShortageError) else None

    def take(self, size: float, where: Literal["step", "commit"]) -> None:
        if self.limit is not None and self.resident + size > self.limit:
            self.failures += 1
            raise FakeShortageError(where)
        self.peak = max(self.peak, self.resident + int(size))


@dataclasses.dataclass
class FakePendingStep:
    """A step that was believed."""

    batch: tuple[Phase, Any, Any]
    fails: bool
    repeated: Any = None

    def repeated_with(self, logs: Any) -> None:
        self.repeated = logs


@dataclasses.dataclass
class FakeStep:
    """Remembers in `done` every batch that went through, as (phase, samples, pieces)."""

    memory: FakeMemory
    fixed: int = 0
    slope: int = 1
    update: int = 0
    equal_pieces: bool = False
    inexact: tuple[str, ...] = ()
    done: list[tuple[Phase, list[Any], int]] = dataclasses.field(default_factory=list)
    probes: list[int] = dataclasses.field(default_factory=list)
    proofs: list[int] = dataclasses.field(default_factory=list)
    proven: Exactness = dataclasses.field(default_factory=Exactness)
    seen: list[Exactness | None] = dataclasses.field(default_factory=list)
    predicts: Exactness | None = None
    learnt: dict[str, Any] = dataclasses.field(default_factory=dict)
    # Numbers of the training steps that are believed and fail later.
    late: frozenset[int] = frozenset()
    pending: list[FakePendingStep] = dataclasses.field(default_factory=list)
    budget: int | None = None
    recompute: tuple[str, ...] = ()
    head: tuple[str, int] | None = None
    batches_on_device = 0
    tries_are_cheap: bool = False
    searches_kernels: bool = False
    failure: Exception | None = None
    fingerprint: Any = None
    traces_hold_variables = False
    trained: int = 0
    # Bytes that the first run of each size takes on top, and the sizes that were run.
    search: int = 0
    ran: set[int] = dataclasses.field(default_factory=set)

    def settle(self) -> None: ...

    def wait_for_pending(self, everything: bool) -> list[FakePendingStep]:
        while len(self.pending) > (0 if everything else 1):
            if self.pending[0].fails:
                failed, self.pending = self.pending, []
                self.failure = FakeShortageError("step")
                del self.done[len(self.done) - len(failed) :]
                return failed
            self.pending.pop(0)
        return []

    def prepare(self, data: Any, phase: Phase) -> None:
        pass

    def trace_key(self, phase: Phase, data: Any, spec: Any) -> Any:
        return None

    def batch_size(self, data: Any) -> int:
        return len(data)

    def sample_bytes(self, data: Any) -> int:
        return 1

    def splittable(self, data: Any) -> bool:
        return not isinstance(data, tuple)  # A tuple plays the batch that cannot be cut.

    def train(self, data: Any, pieces: int, lean: bool, spec: Any = None) -> Any:
        self._gradients(largest_piece(len(data), pieces))
        self.memory.take(self.update // 3 if lean else self.update, "commit")
        if self.late:
            self.pending.append(FakePendingStep(("train", data, spec), self.trained in self.late))
        self.trained += 1
        return self._done("train", data, pieces)

    def test(self, data: Any, pieces: int, spec: Any = None) -> Any:
        self._gradients(largest_piece(len(data), pieces))
        return self._done("test", data, pieces)

    def predict(self, data: Any, pieces: int, spec: Any = None) -> Any:
        self._gradients(largest_piece(len(data), pieces))
        return self._done("predict", data, pieces)

    def loss(self, data: Any, pieces: int) -> float:
        return 0.0

    def probe(self, data: Any, samples: int, phase: Phase) -> None:
        self.probes.append(samples)
        self._gradients(samples)

    def equal_pieces_only(self) -> bool:
        return self.equal_pieces

    def caveats(self) -> tuple[str, ...]:
        return self.inexact

    def prove(self, data: Any, samples: int, cut: bool) -> Exactness:
        if cut and self.inexact:
            return Exactness("not exact", self.inexact)
        self.proofs.append(samples)
        self._gradients(min(samples, len(data)))
        return self.proven

    def look(self, data: Any, pieces: int, again: bool = False, room: int | None = None) -> Exactness | None:
        return self.seen.pop(0) if self.seen else None

    def look_at_predictions(self, data: Any) -> Exactness | None:
        return self.predicts

    def notes(self) -> tuple[str, ...]:
        return ()

    def resident(self) -> dict[str, int]:
        return {"weights": self.memory.resident, "optimizer": 0, "gradients": 0}

    def _gradients(self, samples: int) -> None:
        search = 0 if samples in self.ran else self.search
        self.memory.take(self.fixed + self.slope * samples + search, "step")
        self.ran.add(samples)

    def _done(self, phase: Phase, data: Any, pieces: int) -> Any:
        self.done.append((phase, list(data), pieces))
        return {"loss": 0.0}
