"""What a framework would allocate: predicts, never trains.

One package for each backend, imported when it is first asked: training needs none of it.
"""

from __future__ import annotations

import contextlib
import importlib
import threading
from collections.abc import Iterator
from typing import Any, Protocol

from oomproof._records.patience import TookTooLongError, look_at_the_clock, time_left
from oomproof._records.trace import Compiled, Trace, Workload
from oomproof.errors import BackendError

_lock = threading.RLock()


class Named(Protocol):
    """A backend, as far as this room knows one."""

    name: str


@contextlib.contextmanager
def one_at_a_time() -> Iterator[None]:
    """A model has stand-ins in it while it is traced, and the collector of cycles is held for the whole process.

    Whoever changes a model for a trace, such as its precision, takes this around that, too. Others are waited for, but
    not beyond the `patience` of this thread.
    """
    left = time_left()
    if not _lock.acquire(timeout=-1 if left is None else max(left, 0.0)):
        look_at_the_clock()
        raise TookTooLongError("another thread estimates or plans, and was not done in time")
    try:
        yield
    finally:
        _lock.release()


def trace(backend: Named, model: Any, workload: Workload) -> Trace:
    """The step as it would run, from shapes alone. The model stays as it was."""
    with one_at_a_time():
        traced: Trace = _module(backend, "trace").trace(model, workload)
    return traced


def why_not_compile(backend: Named, workload: Workload) -> str | None:
    """`None` where `compiled` can answer, else what is missing, in words."""
    if backend.name == "torch":
        return "programs of torch are not planned by XLA"
    reason: str | None = _module(backend, "compile").why_not(workload)
    return reason


def compiled(backend: Named, model: Any, workload: Workload, memory: int | None) -> Compiled:
    """What XLA says the step needs, compiled and not run, on a card with that much memory."""
    if backend.name == "torch":
        raise BackendError(f'{why_not_compile(backend, workload)}. Use engine="trace".')
    with one_at_a_time():
        answer: Compiled = _module(backend, "compile").compile_step(model, workload, memory)
    return answer


def _module(backend: Named, name: str) -> Any:
    return importlib.import_module(f"oomproof._simulators.{backend.name}.{name}")
