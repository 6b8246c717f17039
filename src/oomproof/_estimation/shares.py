"""Who holds what at the peak of a step, and when that is."""

from __future__ import annotations

import collections
from collections.abc import Iterable, Sequence

from oomproof._backends.pieces import piece_bounds
from oomproof._estimation.allocator import Replay
from oomproof._records.trace import Buffer, Trace

_POINTS = 500


def by_category(replayed: Replay, peak: int) -> dict[str, int]:
    """Bytes at the peak by what they are for, largest first."""
    return _summed(((buffer.category, size) for buffer, size in _scaled(replayed, peak)), peak, "temporary")


def by_layer(replayed: Replay, peak: int) -> tuple[tuple[str, int], ...]:
    """Bytes at the peak by layer, largest first; those of no layer have an empty path."""
    sums = _summed(((buffer.layer, size) for buffer, size in _scaled(replayed, peak)), peak, "")
    return tuple(sums.items())


def _scaled(replayed: Replay, peak: int) -> list[tuple[Buffer, int]]:
    """What is alive at the peak, with sizes that do not add up to more than it.

    What is there before the step is known exactly. Where an engine knows the peak and the trace only who takes it, the
    rest is taken in proportion.
    """
    fixed = sum(buffer.size for buffer in replayed.live if buffer.start < 0)
    moving = sum(buffer.size for buffer in replayed.live if buffer.start >= 0)
    factor = max(0, peak - fixed) / moving if moving else 0.0
    if peak == replayed.peak:
        # The difference is what the allocator rounds up and cannot use, which is nobody's.
        factor = min(1.0, factor)
    return [(b, b.size if b.start < 0 else int(b.size * factor)) for b in replayed.live]


def _summed(pairs: Iterable[tuple[str, int]], peak: int, nobody: str) -> dict[str, int]:
    """Sums by name, largest first; what is missing to the peak goes to `nobody`."""
    sums: collections.Counter[str] = collections.Counter()
    for name, size in pairs:
        sums[name] += size
    sums[nobody] += max(0, peak - sum(sums.values()))
    return {name: size for name, size in sums.most_common() if size}


def moment(trace: Trace, replayed: Replay) -> str:
    if not trace.ops:
        return "step"
    op = trace.ops[replayed.at]
    stage = {"forward": "forward pass", "backward": "backward pass", "update": "update"}[op.stage]
    return f"{stage} of {op.layer}" if op.layer else stage


def thinned(timeline: Sequence[int]) -> tuple[int, ...]:
    """At most 500 points, each the largest of those it stands for."""
    if len(timeline) <= _POINTS:
        return tuple(timeline)
    return tuple(max(timeline[start:stop]) for start, stop in piece_bounds(len(timeline), _POINTS))
