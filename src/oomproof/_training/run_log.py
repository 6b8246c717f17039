"""Keeps what happened in a run, and says it in one line each through the `oomproof` logger."""

from __future__ import annotations

import logging
import math
import time

from oomproof._machine import host
from oomproof._records.exactness import Exactness
from oomproof._records.plan import Plan
from oomproof._records.run import Device, Event, EventKind, Phase, Run
from oomproof._records.units import format_bytes
from oomproof._training.helpers import optional

logger = logging.getLogger("oomproof")

# The host's memory is read between steps, but not more often than this.
_SECONDS_BETWEEN_LOOKS = 1.0
# With less than this share of the host's memory left, or so many bytes of a large one, swapping or the kernel is near.
_LITTLE, _LITTLE_BYTES = 0.05, 2 * 2**30


class RunLog:
    """Events, counts and peaks of one run after another."""

    def __init__(self) -> None:
        self.start(silent=False)

    def start(self, silent: bool) -> None:
        """A new run begins."""
        self.silent = silent
        self.epoch: int | None = None
        self.peak: int | None = None
        self.host_peak: int | None = None
        self.steps: dict[Phase, int] = {"train": 0, "test": 0, "predict": 0}
        self.exactness = Exactness()
        self._events: list[Event] = []
        self._began = time.perf_counter()
        self._next_look = self._began
        self._warned = False

    def finished(self, phase: Phase, batch_size: int) -> None:
        """Counts a batch that went through, and looks at the host now and then."""
        self.steps[phase] += 1
        now = time.perf_counter()
        if now < self._next_look:
            return
        # Not looked at again in this run if it fails.
        self._next_look = math.inf
        with optional("Watching the host's memory"):
            self._look_at_host(phase, batch_size)
            self._next_look = now + _SECONDS_BETWEEN_LOOKS

    def _look_at_host(self, phase: Phase, batch_size: int) -> None:
        held, left, total = host.resident(), host.available(), host.total()
        if held is not None:
            self.host_peak = max(self.host_peak or 0, held)
        if left is not None and total and left < min(_LITTLE * total, _LITTLE_BYTES) and not self._warned:
            self._warned = True
            ours = "" if held is None else f", {format_bytes(held)} held by this process"
            message = (
                f"The host is nearly out of memory: {format_bytes(left)} of {format_bytes(total)} left{ours}. Before "
                "the kernel kills the process, see what your data holds (oomproof.data.audit) and make it hold less "
                "(oomproof.data.tune)."
            )
            self.note("note", phase, batch_size, message, free=left)

    def note(
        self,
        kind: EventKind,
        phase: Phase,
        batch_size: int,
        message: str,
        *,
        before: int | None = None,
        after: int | None = None,
        needed: int | None = None,
        free: int | None = None,
        seconds: float = 0.0,
    ) -> None:
        """Keeps an event, and says it."""
        message = f"oomproof: {message}"
        step = self.steps[phase]
        self._events.append(
            Event(kind, phase, self.epoch, step, batch_size, before, after, needed, free, seconds, message)
        )
        if not self.silent:
            logger.warning(message)

    def say(self, message: str) -> None:
        """What is worth a line in the log, and nothing that happened."""
        if not self.silent:
            logger.warning(f"oomproof: {message}")

    def saw_peak(self, peak: int) -> None:
        self.peak = max(self.peak or 0, peak)

    def record(self, backend: str, versions: dict[str, str], device: Device, budget: int | None, plan: Plan) -> Run:
        return Run(
            backend=backend,
            versions=versions,
            device=device,
            budget=budget,
            plan=plan,
            steps={str(phase): count for phase, count in self.steps.items()},
            peak=self.peak,
            host_peak=self.host_peak,
            seconds=time.perf_counter() - self._began,
            events=tuple(self._events),
            exactness=self.exactness,
        )
