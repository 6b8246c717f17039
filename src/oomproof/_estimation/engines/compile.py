"""The engine that asks XLA: the step compiled for the card, at hand or not, and never run.

XLA says how much it takes; who takes it is read from the trace.
"""

from __future__ import annotations

import dataclasses

from oomproof import _simulators as simulators
from oomproof._estimation.allocator import replay
from oomproof._estimation.engines.base import Answer, Question
from oomproof._records.trace import Trace


def why_not(question: Question) -> str | None:
    if not question.workload.jit:
        return "the step is not compiled by XLA, so there is no plan of its memory"
    return simulators.why_not_compile(question.backend, question.workload)


def answer(question: Question) -> Answer:
    memory = None if question.gpu is None else question.gpu.memory
    compiled = simulators.compiled(question.backend, question.model, question.workload, memory)
    trace = compiled.trace or simulators.trace(question.backend, question.model, question.workload)
    if compiled.tuned:
        return Answer(trace, peak=compiled.peak, tuned=True, notes=compiled.notes)
    more = _workspaces(trace)
    return Answer(trace, peak=compiled.peak + more, unknown=(more, more), notes=compiled.notes)


def _workspaces(trace: Trace) -> int:
    """By how much workspaces, which a program compiled without its GPU has none of, raise the peak of a trace."""
    known = tuple(buffer for buffer in trace.buffers if not buffer.workspace)
    # Packing is not exact: with fewer buffers it can come out larger.
    return max(0, replay(trace).peak - replay(dataclasses.replace(trace, buffers=known)).peak)
