"""Why nothing fits, in numbers, and what would."""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterator, Sequence

from oomproof._planning.levers import as_set
from oomproof._planning.options import Option, Request
from oomproof._planning.ways import Way, predict
from oomproof._records.diagnosis import short_of
from oomproof._records.units import format_bytes
from oomproof.errors import CannotFitError


def cannot_fit(request: Request, own: Way, options: Sequence[Option]) -> CannotFitError:
    """The error for a batch that nothing allowed makes fit.

    Args:
        request: What was asked for.
        own: The step as the user compiled it.
        options: All that was looked at, allowed or not.
    """
    tried = [option for option in options if option.levers <= request.allowed]
    diagnosis = short_of(
        math.ceil(min(option.predicted for option in tried or options) * request.margin),
        request.limit,
        "Nothing that is allowed fits.",
        f"print(oomproof.max_batch_size(model, memory={request.limit}))  # the largest batch that does",
    )
    return CannotFitError(_refusal(request, own, tried, options), diagnosis=diagnosis)


def _refusal(request: Request, own: Way, tried: Sequence[Option], options: Sequence[Option]) -> str:
    closest = min(tried or options, key=lambda option: option.predicted)
    there_is = f"there is {format_bytes(request.limit)}"
    if tried:
        need = {each.name: format_bytes(each.predicted * request.margin) for each in tried}
        happened = (
            f"Batch {request.batch_size} does not fit: at least {need[closest.name]} is needed ({closest.name}), and "
            f"{there_is}. Tried: {'; '.join(f'{name}: {size}' for name, size in need.items())}."
        )
    else:
        pieces = f"pieces of at most {request.micro_batch_size}"
        happened = f"Batch {request.batch_size} is to run in {pieces}, cutting is not allowed, and {there_is}."
    ways_out = [f"\n  {way_out}" for way_out in _ways_out(request, own, options, closest)]
    return f"{happened} What would make it fit:{''.join(ways_out)}"


def _ways_out(request: Request, own: Way, options: Sequence[Option], closest: Option) -> Iterator[str]:
    offered: list[frozenset[str]] = []
    for option in sorted(options, key=lambda option: (len(option.levers - request.allowed), option.time)):
        missing = option.levers - request.allowed
        # What needs more levers than another that fits is no news.
        if not request.missing(option.predicted) and not any(fewer <= missing for fewer in offered):
            offered.append(missing)
            exact = f"not exact: {'; '.join(option.caveats)}" if option.caveats else "to be proven on the first batch"
            size, time = format_bytes(option.predicted), f"{option.time:.2f}× step time"
            yield f"allow={as_set(request.allowed | missing)}: {option.name}, {size}, {time} ({exact})"
    sizes = range(1, request.batch_size)
    batch = bisect.bisect_right(sizes, request.most, key=lambda size: predict(own, size, size))
    if closest.pieces == 1 and batch:
        yield f"a batch of {batch}, which fits as it is"
    if not request.missing(closest.predicted):
        return
    chain, gradients = closest.way.chain, closest.way.gradients
    if (state := chain.resident - gradients) > 0:
        yield f"an optimizer with less state (SGD, Adafactor): up to {format_bytes(state)} less"
    yield f"fewer trained weights (frozen layers, LoRA): their gradients are {format_bytes(gradients)}"
    still = chain.resident + gradients + chain.update + (gradients if closest.pieces > 1 and closest.way.adds_up else 0)
    if still < request.most:
        share = (request.most - still) / (closest.predicted - still)
        yield f"smaller samples (images, sequences): {share:.0%} of the memory that they take now"
    yield f"a device with {format_bytes(closest.predicted * request.margin)} to use"
