"""What a framework would allocate: predicts, never trains.

One package for each backend, imported when it is first asked: training needs none of it.
"""

from __future__ import annotations

import importlib
import threading
from typing import Any, Protocol

from oomproof._records.trace import Compiled, Trace, Workload
from oomproof.errors import BackendError

# A model has stand-ins in it while it is traced, and the collector of cycles is held for the whole process. Whoever
# changes a model for a trace, such as its precision, takes it around that, too.
ONE_AT_A_TIME = threading.RLock()


class Named(Protocol):
    """A backend, as far as this room knows one."""

    name: str


def trace(backend: Named, model: Any, workload: Workload) -> Trace:
    """The step as it would run, from shapes alone. The model stays as it was."""
    with ONE_AT_A_TIME:
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
    with ONE_AT_A_TIME:
        answer: Compiled = _module(backend, "compile").compile_step(model, workload, memory)
    return answer


def _module(backend: Named, name: str) -> Any:
    return importlib.import_module(f"oomproof._simulators.{backend.name}.{name}")
