"""The engine that asks XLA: the step compiled for the card, at hand or not, and never run.

XLA says how much it takes; who takes it is read from the trace.
"""

from __future__ import annotations

from oomproof.estimation.engines import Answer, Question


def why_not(question: Question) -> str | None:
    if not question.workload.jit:
        return "the step is not compiled by XLA, so there is no plan of its memory"
    return question.backend.why_not_compile(question.workload)


def answer(question: Question) -> Answer:
    memory = None if question.gpu is None else question.gpu.memory
    compiled = question.backend.compile(question.model, question.workload, memory)
    trace = question.backend.trace(question.model, question.workload)
    workspace = compiled.workspace
    return Answer(
        trace,
        peak=compiled.peak + workspace.expected,
        unknown=(workspace.expected, workspace.upper - workspace.expected),
        notes=compiled.notes,
    )
