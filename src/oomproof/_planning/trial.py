"""A plan that is seen to fit: the step that it makes is traced, and played through the allocator's rules.

Predictions are put together from parts of the plain step. The trace of a plan is of its own step, and says more: where
that leaves room, a faster plan may fit; where it does not go through, one that takes less must be found.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

from oomproof._estimation.allocator import goes_through, replay
from oomproof._records.plan import Plan
from oomproof._records.trace import Buffer, Trace
from oomproof.errors import CannotFitError

# What is left to a plan when it is chosen. Little, for it is looked at.
MARGIN = 1.05
# What is taken from the card beside what a trace shows: library handles, and what only a first step makes.
_BEYOND_TRACE = 1.04
# How often a plan is looked at, and by how much the margin is raised at least where one does not go through.
_LOOKS = 3
_MORE_CAUTION = 1.05
# How much of the room a plan is to use. Where it is at least so much, another look would not find much.
_WANTED = 0.97
_FULL = 0.93


def fastest_tried(
    margin: float,
    limit: float,
    fastest: Callable[[float], Plan],
    trace_of: Callable[[Plan], Trace],
    least_of: Callable[[Plan], int],
) -> Plan:
    """The fastest plan that was seen to go through; if none was, the last that was looked at.

    Args:
        margin: To begin with.
        limit: Bytes there are.
        fastest: The fastest plan whose prediction, times a margin, is within the limit. May raise `CannotFitError`.
        trace_of: The step of a plan.
        least_of: Bytes that a plan takes whatever its trace says.
    """
    room = limit / _BEYOND_TRACE
    found, seen = fastest(margin), list[Plan]()
    # The least margin of a plan that goes through, and the largest of one that does not.
    safe = bold = None
    peak = 0
    for look in range(_LOOKS):
        trace = trace_of(found)
        peak = max(replay(trace).peak, least_of(found))
        fill = peak / (_WANTED * room)
        if peak <= room and goes_through(trace, int(room)):
            seen.append(_as_seen(found, peak))
            safe = margin
            if peak > _FULL * room:
                break
            margin = math.sqrt(safe * bold) if bold else safe * fill
        else:
            bold = margin
            margin = math.sqrt(safe * bold) if safe else bold * max(fill, _MORE_CAUTION)
        if look == _LOOKS - 1:
            break
        try:
            other = fastest(margin)
        except CannotFitError:
            break
        if any(_same(other, plan) for plan in (found, *seen)):
            break
        found = other
    # Where none goes through, the last is tried all the same, and says what it takes.
    return seen[-1] if seen else _as_seen(found, peak)


def with_update_of(trace: Trace, size: int) -> Trace:
    """The trace of a step whose update takes no more than that while it runs."""
    updating = {at for at, op in enumerate(trace.ops) if op.stage == "update"}
    if not updating:
        return trace
    begin, done = min(updating), len(trace.ops)
    kept = [b for b in trace.buffers if b.start not in updating or b.end >= done]
    return dataclasses.replace(trace, buffers=(*kept, Buffer(size, begin, begin, "temporary", "")))


def _as_seen(plan: Plan, peak: int) -> Plan:
    rows = (dataclasses.replace(row, predicted=peak) if row.taken else row for row in plan.alternatives)
    return dataclasses.replace(plan, predicted=peak, alternatives=tuple(rows))


def _same(one: Plan, other: Plan) -> bool:
    names = ("micro_batch_size", "recompute", "precision", "lean_commit")
    return all(getattr(one, name) == getattr(other, name) for name in names)
