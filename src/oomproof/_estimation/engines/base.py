"""What an engine is asked, what it answers, and which one is asked.

An engine is a module of this package with two functions: `why_not(question)`, `None` or why it cannot answer here, and
`answer(question)`.
"""

from __future__ import annotations

import dataclasses
import importlib
from typing import Any

from oomproof._backends.base import Backend
from oomproof._machine.gpus import Gpu
from oomproof._records.trace import Trace, Workload
from oomproof.errors import BackendError


@dataclasses.dataclass(frozen=True)
class Question:
    """A step, and where it is to run.

    Attributes:
        backend: The framework.
        model: Built, and compiled unless it is only to predict.
        workload: The step.
        gpu: The card, or `None` where none is named.
    """

    backend: Backend
    model: Any
    workload: Workload
    gpu: Gpu | None


@dataclasses.dataclass(frozen=True)
class Answer:
    """What an engine found out.

    Attributes:
        trace: The step, allocation by allocation.
        peak: Bytes at the peak, where the engine knows better than a replay of the trace.
        unknown: Bytes by which the peak may be lower, and higher, because of what cannot be known. The engine's
            usual error comes on top.
        measured: Whether `peak` was measured on the step itself.
        tuned: Whether `peak` is XLA's plan for the card in this machine, whose autotuner chose the kernels.
        notes: What to know about it, in words.
    """

    trace: Trace
    peak: int | None = None
    measured: bool = False
    tuned: bool = False
    unknown: tuple[int, int] = (0, 0)
    notes: tuple[str, ...] = ()


# In the order in which "auto" asks them: the more exact first. One that runs real steps must be asked for by name, and
# "trace" always answers.
ENGINES = ("compile", "trace", "probe")


def engine_for(name: str, question: Question) -> tuple[str, Any]:
    """(name, module) of the engine to ask.

    Raises:
        ValueError: For an unknown name.
        BackendError: For an engine that cannot answer here.
    """
    if name != "auto" and name not in ENGINES:
        raise ValueError(f'Expected `engine` to be one of "auto", {_listed(ENGINES)}. Received: engine={name!r}')
    reasons = []
    for each in ENGINES if name == "auto" else (name,):
        engine = importlib.import_module(f"oomproof._estimation.engines.{each}")
        reason = engine.why_not(question)
        if reason is None:
            return each, engine
        reasons.append(f"engine {each!r} cannot be used: {reason}")
    raise BackendError("; ".join(reasons))


def _listed(names: tuple[str, ...]) -> str:
    return ", ".join(f'"{name}"' for name in names)
