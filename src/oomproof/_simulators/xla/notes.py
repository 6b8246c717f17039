"""What is to be said about an estimate of a program that XLA compiles."""

from __future__ import annotations

from oomproof._simulators.xla.program import Program


def notes_on(program: Program) -> tuple[str, ...]:
    return ("What convolutions work in is modelled.",) if _convolves(program) else ()


def _convolves(program: Program) -> bool:
    return any(node.convolution is not None or any(map(_convolves, node.bodies)) for node in program.nodes)
