"""Runs side by side on one card: each in a process of its own, with its share of memory and its time limit."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

from meters import environment
from worker import MARK, OUT_OF_MEMORY

WORKER = pathlib.Path(__file__).parent / "worker.py"
# The rest of the card is for the contexts of the processes, which no allocator counts.
USABLE = 0.92


@dataclasses.dataclass(frozen=True, slots=True)
class Task:
    """A run to be made.

    Attributes:
        case: What worker.py is given.
        share: The part of the card that is the run's own.
        limit_s: Seconds after which it is stopped.
    """

    case: dict[str, Any]
    share: float
    limit_s: float


class Child:
    """A running task."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self._began = time.monotonic()
        # Files rather than pipes: a framework that says a lot would wait for a reader.
        self._out, self._err = tempfile.TemporaryFile(), tempfile.TemporaryFile()  # noqa: SIM115
        case = task.case
        self._process = subprocess.Popen(
            [sys.executable, str(WORKER), json.dumps(case)],
            env=os.environ | environment(case["stack"], case["device"], case["room"], task.share) | _cache(case),
            stdout=self._out,
            stderr=self._err,
            process_group=0,
        )

    def done(self) -> bool:
        return self._process.poll() is not None

    def late(self) -> bool:
        return time.monotonic() - self._began > self.task.limit_s

    def stop(self) -> None:
        if not self.done():
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def result(self, stopped: bool = False) -> dict[str, Any]:
        """What the worker told, and how it ended."""
        found: dict[str, Any] = {"seconds": round(time.monotonic() - self._began, 2)}
        for line in _text(self._out).splitlines():
            if line.startswith(MARK):
                found |= json.loads(line.removeprefix(MARK))
        if "outcome" not in found:
            complaint = _text(self._err)[-1500:]
            # Some failures to allocate end the process before Python sees an error.
            died = "out of memory" if OUT_OF_MEMORY.search(complaint) else "failed"
            found |= {"outcome": "not finished" if stopped else died, "exit": self._process.returncode}
            if not stopped:
                found["error"] = complaint
        return found


def run(
    tasks: list[Task],
    jobs: int,
    finished: Callable[[Task, dict[str, Any]], list[Task]],
    deadline: float | None = None,
    usable: float = USABLE,
) -> list[Task]:
    """Runs tasks in their order, as many at a time as there are jobs and room.

    Args:
        tasks: What is to be run.
        jobs: Processes at a time.
        finished: Told each result; what it returns is run next.
        deadline: When to stop everything, on `time.monotonic`. What is running then is given up.
        usable: The part of the card that all of them together may have.

    Returns:
        What was not run to an end.
    """
    waiting, running = list(tasks), list[Child]()
    try:
        while waiting or running:
            if deadline is not None and time.monotonic() > deadline:
                return [child.task for child in running] + waiting
            while waiting and len(running) < jobs and _fits(waiting[0], running, usable):
                running.append(Child(waiting.pop(0)))
            for child in [child for child in running if child.done() or child.late()]:
                stopped = not child.done()
                child.stop()
                running.remove(child)
                waiting[:0] = finished(child.task, child.result(stopped))
            time.sleep(0.1)
        return []
    finally:
        for child in running:
            child.stop()


def _cache(case: dict[str, Any]) -> dict[str, str]:
    """Where programs of a run on JAX are kept for the same run once more, which then has not to look for kernels."""
    if case["stack"] != "jax" or "id" not in case:
        return {}
    return {
        "JAX_COMPILATION_CACHE_DIR": f"{tempfile.gettempdir()}/estimate-programs/{case['id']}",
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }


def _fits(task: Task, running: list[Child], usable: float) -> bool:
    return not running or sum(child.task.share for child in running) + task.share <= usable


def _text(file: Any) -> str:
    file.seek(0)
    return str(file.read().decode(errors="replace"))
