"""Where the head of a model can begin, and what a step is made of whose head runs in parts."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import NamedTuple

from oomproof._planning import remat
from oomproof._records.trace import Chain, Segment

# A head that takes less than this share of the peak is left as it is.
_WORTH_IT = 0.1
# Nor cut into smaller parts than this share of what the body's largest segment takes.
_FURTHER = 4
# Up to so many parts each number is twice the one before, and then four times: each is a search of its own.
_DOUBLED = 16


class Head(NamedTuple):
    """The segment that a head begins with, and into how many parts it is cut."""

    start: int
    parts: int


def worth_trying(chain: Chain, samples: int) -> Iterator[Head]:
    """Heads, and into how many parts to cut them, that may be of use for so many samples; the fewest parts first."""
    starts = [start for start in chain.heads if bytes_of(chain, start) > _WORTH_IT * chain.peak]
    if not starts or samples < 2:
        return

    def lasting(start: int) -> int:
        # The gradient of what crosses, and one part of many.
        return 2 * crossing(chain, start) + bytes_of(chain, start) // samples

    start = min(starts, key=lasting)
    least = max(segment.kept + segment.work for segment in chain.segments[:start]) // _FURTHER
    parts = 2
    while parts < samples and bytes_of(chain, start) > parts * least:
        yield Head(start, parts)
        parts *= 2 if parts < _DOUBLED else 4
    yield Head(start, min(parts, samples))


def crossing(chain: Chain, start: int) -> int:
    """Bytes that the body hands on to a head that begins there."""
    behind = enumerate(reversed(chain.segments[:start]))
    return sum(segment.crossing[after] for after, segment in behind if after < len(segment.crossing))


def bytes_of(chain: Chain, start: int) -> int:
    """Bytes that a head takes at its peak, the loss included and the gradients of its weights left out."""
    head = remat.scaled(chain.segments[start:], 1, 1, with_gradients=False)
    return max(remat.peak(head, ()), sum(segment.kept for segment in head)) + chain.outside + missing(chain, start)


def missing(chain: Chain, start: int) -> int:
    """Bytes by which the estimate is above what segments add up to, where that is while the head or the loss runs."""
    segments = chain.segments
    if remat.busiest(segments) < start:
        return 0
    known = chain.resident + chain.inputs + chain.outside + chain.scratch + remat.peak(segments, ())
    return max(0, chain.peak - known) if known >= chain.resident + chain.update else 0


def with_head(chain: Chain, head: Head) -> Chain:
    """A step whose head runs in parts, as one segment that cannot be recomputed."""
    start, parts = head
    segments = chain.segments[start:]
    one = Segment(
        first=segments[0].first,
        last=segments[-1].last,
        # The gradient of what it is given waits until all parts are done.
        kept=crossing(chain, start),
        crossing=(),
        work=-(-bytes_of(chain, start) // parts),
        gradients=sum(segment.gradients for segment in segments),
        cost=sum(segment.cost for segment in segments),
        recomputable=False,
    )
    return dataclasses.replace(chain, segments=(*chain.segments[:start], one), outside=0)
