"""How to make a batch fit at the least cost of time: a pure function from what a step is made of to a `Plan`.

The space is small: ways to compile and compute the step, numbers of pieces, and for each the segments to recompute,
which `remat` chooses. Of each combination of levers the fastest that fits is found, or what comes closest, and the best
of those is the plan. The others become the table that the plan prints.
"""

from __future__ import annotations

from collections.abc import Sequence

from oomproof._planning import remat
from oomproof._planning.levers import as_set
from oomproof._planning.no_plan import cannot_fit
from oomproof._planning.options import Option, Request, options_of
from oomproof._planning.ways import Way
from oomproof._records.plan import Alternative, Plan
from oomproof._records.units import format_bytes

# A step that fits as it is stays as it is, unless another way is faster than this. Estimates of time are not sharper.
_WORTH_A_CHANGE = 0.95
_ROWS = 12


def fastest(request: Request, ways: Sequence[Way]) -> Plan:
    """The fastest plan that is allowed and fits.

    What changes results is taken only where nothing exact fits, but for another precision: who allows that wants it
    wherever it is faster. A batch that fits as it is is run as it is, unless an allowed lever makes it clearly faster.

    Args:
        request: The batch, the memory and the levers.
        ways: How the step can be compiled and computed. One is the user's own; those that are not allowed are
            looked at to say what they would do.

    Raises:
        CannotFitError: When nothing that is allowed fits.
    """
    own = next((way for way in ways if way.own), None)
    if own is None:
        raise ValueError("Expected one of `ways` to be the user's own. Received none.")
    options = [option for way in ways for option in options_of(request, own, way)]
    taken = _best(request, options)
    if taken is None:
        raise cannot_fit(request, own, options)
    chain = taken.way.chain
    return Plan(
        micro_batch_size=taken.micro if taken.pieces > 1 else None,
        recompute=tuple(remat.label(chain.segments[start:end]) for start, end in taken.runs),
        head=None if taken.way.head is None else chain.segments[taken.way.head.start].first,
        head_parts=1 if taken.way.head is None else taken.way.head.parts,
        jit_compile=None if taken.way.jit == own.jit else taken.way.jit,
        precision=None if taken.way.precision == own.precision else taken.way.precision,
        caveats=taken.caveats,
        batch_size=request.batch_size,
        predicted=taken.predicted,
        limit=request.limit,
        relative_time=taken.time,
        segments=taken.way.recomputable,
        recomputed=taken.recomputed,
        alternatives=_table(request, options, taken),
    )


def _best(request: Request, options: Sequence[Option]) -> Option | None:
    fitting = [each for each in options if each.predicted <= request.most and each.levers <= request.allowed]
    fitting = [each for each in fitting if "batch_statistics" not in each.levers] or fitting
    # Of equal times, the one that changes less.
    best = min(fitting, key=lambda each: (round(each.time, 9), len(each.levers)), default=None)
    as_it_is = next((each for each in fitting if not each.levers), None)
    return as_it_is if as_it_is and best and best.time >= _WORTH_A_CHANGE else best


def _table(request: Request, options: Sequence[Option], taken: Option) -> tuple[Alternative, ...]:
    def rank(option: Option) -> tuple[bool, bool, bool, bool, float]:
        allowed, fits = option.levers <= request.allowed, option.predicted <= request.most
        return option is not taken, bool(option.levers), not allowed, not fits, option.time

    told = sorted(options, key=rank)[:_ROWS]
    return tuple(
        Alternative(each.name, each.predicted, each.time, _exact(each), each is taken, _why(request, each, taken))
        for each in options
        if each in told
    )


def _exact(option: Option) -> bool | None:
    """Plain steps are exact; what changes them has to be proven, unless it is known not to be."""
    return False if option.caveats else None if option.levers else True


def _why(request: Request, option: Option, taken: Option) -> str:
    if missing := request.missing(option.predicted):
        return f"does not fit: {format_bytes(missing)} too much"
    if option is taken:
        if not taken.levers:
            return "taken: it fits as it is"
        if "batch_statistics" in taken.levers:
            return "taken: the fastest that fits; nothing exact does"
        return "taken: the fastest that fits"
    if not option.levers <= request.allowed:
        return f"not allowed: needs allow={as_set(option.levers - request.allowed)}"
    times = f"({option.time:.2f}× against {taken.time:.2f}×)"
    if "batch_statistics" in option.levers and "batch_statistics" not in taken.levers:
        return "fits, but is not exact"
    if option.time > taken.time:
        return f"fits, slower {times}"
    if not taken.levers and option.time < taken.time:
        return f"fits, hardly faster {times}"
    return "fits, as fast with more levers"
