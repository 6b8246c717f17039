"""The engine that is always there: the real step traced on shapes, and replayed through the allocator's rules."""

from __future__ import annotations

from oomproof import _simulators as simulators
from oomproof._estimation.engines.base import Answer, Question


def why_not(question: Question) -> str | None:
    return None


def answer(question: Question) -> Answer:
    trace = simulators.trace(question.backend, question.model, question.workload)
    return Answer(trace, notes=trace.notes)
