"""What XLA makes of a program, as a list of allocations: which arrays it keeps (fusion.py), what it adds (kernels.py),
and in which order it computes them (schedule.py)."""

from __future__ import annotations

from collections.abc import Sequence

from oomproof._records.trace import Trace
from oomproof._simulators.xla.fusion import Fusion
from oomproof._simulators.xla.program import Program
from oomproof._simulators.xla.schedule import in_order, planned
from oomproof._simulators.xla.writer import Places, Role, Writer

_CONVOLUTIONS = "What convolutions work in is modelled."
_OP_BY_OP = "Run op by op, arrays that Python still refers to are not counted."


def compiled_trace(
    program: Program, settled: set[int], roles: Sequence[Role], places: Places, notes: Sequence[str] = ()
) -> Trace:
    """The program compiled as a whole.

    Args:
        program: What is computed.
        settled: Results, by `id`, that are written over the state.
        roles: What each input of the program is.
        places: Where each operation belongs.
        notes: What had to be assumed about the program.
    """
    plan = planned(Fusion(program).kernels, settled)
    more = (_CONVOLUTIONS,) if _convolves(program) else ()
    return Writer(program, plan, settled, roles, places).trace("xla", (*notes, *more))


def op_by_op_trace(program: Program, roles: Sequence[Role], places: Places, notes: Sequence[str] = ()) -> Trace:
    """Each operation by itself: every result is an array of its own, in the allocator that JAX has on GPUs."""
    plan = in_order(Fusion(program, fuse=False).kernels)
    return Writer(program, plan, set(), roles, places).trace("bfc", (*notes, _OP_BY_OP))


def _convolves(program: Program) -> bool:
    return any(node.convolution is not None or any(map(_convolves, node.bodies)) for node in program.nodes)
