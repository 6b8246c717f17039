"""Which segments of a model to compute again in the backward pass: a pure function of what each keeps and costs.

A run `(a, b)` is the neighbouring segments `a` to `b - 1`, recomputed together: of what they make, only what later
segments need is kept. When the backward pass comes to the run, all of it is made again, so a long run keeps little
but needs much room at its own moment. `choose` weighs that by dynamic programming from left to right: a state is what
the segments so far keep and what recomputing them costs, and each segment or run that is added must have room at its
own moment of the backward pass. All that this moment depends on is known by then: what is kept before it, and the
gradients of the weights behind it.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from oomproof._records.patience import look_at_the_clock
from oomproof._records.trace import Segment

Runs = tuple[tuple[int, int], ...]

# Costs are whole numbers, so that sums of the same segments are equal however they were added up: the time in
# billionths of the forward pass, then the number of runs, then that of the segments in them.
_SEGMENT = 1
_RUN = 10**5
_TICK = 10**10
_TICKS = 10**9
# About as many states are looked at, over all runs. For a few dozen segments these are all there are.
_STATES = 400_000


class _Block(NamedTuple):
    """A run, or one segment that is kept, as the backward pass sees it."""

    start: int
    end: int
    keeps: int
    needs: int  # Beside what is kept before it.
    cost: int  # 0 for what is not recomputed.


class _State(NamedTuple):
    """Blocks up to some segment: what they keep and what they cost."""

    keeps: int
    cost: int
    last: _Block | None
    before: _State | None


def peak(segments: Sequence[Segment], runs: Runs) -> int:
    """Most bytes that segments hold at a moment of the backward pass, gradients of their weights included.

    The end of the forward pass needs no looking at: the backward pass of the last segment begins with all of it.
    """
    behind = _sums_behind([segment.gradients for segment in segments])
    ends = dict(runs)
    most = kept = position = 0
    while position < len(segments):
        end = ends.get(position)
        if end is None:
            block = _kept(segments, position, behind)
        else:
            block = next(run for run in _runs_to(segments, end, behind) if run.start == position)
        most = max(most, kept + block.needs)
        kept += block.keeps
        position = block.end
    return most


def busiest(segments: Sequence[Segment]) -> int:
    """The segment whose backward pass has the most bytes beside it when nothing is recomputed."""
    behind = _sums_behind([segment.gradients for segment in segments])
    kept = itertools.accumulate((segment.kept for segment in segments), initial=0)
    needs = [before + _kept(segments, at, behind).needs for at, before in zip(range(len(segments)), kept, strict=False)]
    return max(range(len(needs)), key=needs.__getitem__, default=0)


def choose(segments: Sequence[Segment], room: int, run_cost: float = 0.0) -> Runs | None:
    """The runs to recompute so that the backward pass stays within `room` bytes, at the least cost of time.

    Of runs that cost the same, the fewest, then the shortest. With more than a few dozen segments only the likeliest
    combinations are looked at; whether there is an answer is certain in any case.

    Args:
        segments: In the order of the forward pass.
        room: Bytes for all that `peak` counts.
        run_cost: What it costs to begin a run, as a share of the forward pass.

    Returns:
        `(start, end)` of each run, in order, or `None` when nothing fits.
    """
    if peak(segments, ()) <= room:
        return ()
    if not segments or _needed_anyway(segments) > room:
        return None
    search = _Search(segments, room, run_cost)
    front = max(2, _STATES // len(segments) ** 2)
    # What is dearer than needed is most of the search. A bound that turns out too low was found out quickly.
    needed = search.promised(0, _State(0, 0, None, None), room)
    for bound in (1.5 * needed, 4 * needed, math.inf):
        if found := search.cheapest(room, front, bound):
            return _runs_of(found)
    return None


def least(segments: Sequence[Segment]) -> Runs:
    """The runs with the smallest peak, to within a thousandth."""
    best: Runs = ()
    low, high = 0, peak(segments, best)
    search = _Search(segments, high)
    while high - low > high // 1000:
        room = (low + high) // 2
        found = search.cheapest(room, 1)
        if found is None:
            low = room + 1
        else:
            best = _runs_of(found)
            high = peak(segments, best)
    return best


def label(run: Sequence[Segment]) -> str:
    """What a run is called in a plan: `"conv_1..relu_3"`, or the label of its only call."""
    first, last = run[0].first, run[-1].last
    return first if first == last else f"{first}..{last}"


def scaled(segments: Sequence[Segment], samples: int, of: int, *, with_gradients: bool = True) -> tuple[Segment, ...]:
    """Segments of a batch of `of` samples, for `samples` of them."""
    return tuple(
        dataclasses.replace(
            segment,
            kept=share(segment.kept, samples, of),
            crossing=tuple(share(size, samples, of) for size in segment.crossing),
            work=share(segment.work, samples, of),
            gradients=segment.gradients if with_gradients else 0,
        )
        for segment in segments
    )


def share(size: int, samples: int, of: int) -> int:
    """Bytes for so many samples of what takes `size` for `of` of them."""
    return -(-size * samples // of)


class _Search:
    """Ways through a chain of segments, block by block, that stay within `most` bytes."""

    def __init__(self, segments: Sequence[Segment], most: int, run_cost: float = 0.0) -> None:
        behind = _sums_behind([segment.gradients for segment in segments])
        self.starting = [[_kept(segments, at, behind)] for at in range(len(segments))]
        for end in range(1, len(segments) + 1):
            for run in _runs_to(segments, end, behind, run_cost):
                if run.needs <= most:
                    self.starting[run.start].append(run)
        self.to_come = _sums_behind([segment.kept for segment in segments])
        self.savings = _savings(segments)

    def cheapest(self, room: int, front: int, bound: float = math.inf) -> _State | None:
        """The cheapest way through that stays within `room`, and is no dearer than `bound`.

        At most about `front` states are kept for each segment. Without a bound, that of the fewest bytes is always one
        of them: where any way leads on, one leads on from there.
        """
        reached: list[list[_State]] = [[] for _ in range(len(self.starting) + 1)]
        reached[0] = [_State(0, 0, None, None)]
        for position, blocks in enumerate(self.starting):
            look_at_the_clock()
            states = self._best(position, reached[position], room, front, bound)
            # In this order what is kept grows and the cost falls, so those that may go on are neighbours.
            keeps = [state.keeps for state in states]
            saved = [-state.cost for state in states]
            for block in blocks if states else ():
                if block.cost - saved[-1] > bound:
                    break  # The longer ones cost more.
                fitting = bisect.bisect_right(keeps, room - block.needs)
                cheap = bisect.bisect_left(saved, block.cost - bound)
                reached[block.end] += [
                    _State(state.keeps + block.keeps, state.cost + block.cost, block, state)
                    for state in states[cheap:fitting]
                ]
        return min(reached[-1], key=lambda state: state.cost, default=None)

    def promised(self, position: int, state: _State, room: int) -> float:
        """What a way that goes on from here costs at least when it is through."""
        missing = state.keeps + self.to_come[position] - room
        return state.cost + self.savings[position].cost(missing)

    def _best(self, position: int, states: list[_State], room: int, front: int, bound: float) -> list[_State]:
        """Those that no other is better than in both, bytes and cost, and that may lead to the end within the bound.

        Of too many, half are those that promise the cheapest end, and half are spread evenly from the first.
        """
        states.sort(key=_keeps_and_cost)
        best: list[tuple[float, _State]] = []
        cheapest = math.inf
        for state in states:
            if state.cost < cheapest:
                cheapest = state.cost
                promise = self.promised(position, state, room)
                best += [(promise, state)] if promise <= bound else []
        if len(best) > front:
            spread = -(-front // 2)
            chosen = {index * len(best) // spread for index in range(spread)}
            chosen.update(sorted(range(len(best)), key=lambda index: best[index][0])[: front // 2])
            best = [best[index] for index in sorted(chosen)]
        return [state for _, state in best]


class _Savings:
    """What it costs at least to keep so many bytes less: the cheapest bytes first, as if they came one by one."""

    def __init__(self, offers: Sequence[tuple[float, int, int]]) -> None:
        self.prices = [price for price, _, _ in offers]
        self.sizes = list(itertools.accumulate((size for _, size, _ in offers), initial=0))
        self.costs = list(itertools.accumulate((cost for _, _, cost in offers), initial=0))

    def cost(self, missing: int) -> float:
        if missing <= 0:
            return 0
        full = bisect.bisect_right(self.sizes, missing) - 1
        if full == len(self.prices):
            return self.costs[-1]
        return self.costs[full] + (missing - self.sizes[full]) * self.prices[full]


def _savings(segments: Sequence[Segment]) -> list[_Savings]:
    """For each segment, what those from there on have to offer."""
    offers: list[tuple[float, int, int]] = []
    found = []
    for segment in reversed(segments):
        if segment.recomputable and segment.kept:
            cost = round(segment.cost * _TICKS) * _TICK
            bisect.insort(offers, (cost / segment.kept, segment.kept, cost))
        found.append(_Savings(offers))
    return found[::-1]


def _kept(segments: Sequence[Segment], at: int, behind: Sequence[int]) -> _Block:
    segment = segments[at]
    return _Block(at, at + 1, segment.kept, segment.kept + segment.work + behind[at], 0)


def _needed_anyway(segments: Sequence[Segment]) -> int:
    """Bytes without which the backward pass of some segment cannot run, whatever is recomputed."""
    behind = _sums_behind([segment.gradients for segment in segments])
    return max(_kept(segments, at, behind).needs for at in range(len(segments)))


def _runs_to(segments: Sequence[Segment], end: int, behind: Sequence[int], run_cost: float = 0.0) -> Iterator[_Block]:
    """Every run that ends there, the shortest first.

    What was made again is let go of as the backward pass of the run goes on, so each of its segments has a moment.
    """
    graph, _, _ = segments[end - 1].last.rpartition("/")
    keeps = needs = 0
    cost = round(run_cost * _TICKS) * _TICK + _RUN
    for start in range(end - 1, -1, -1):
        segment = segments[start]
        if not segment.recomputable or not _is_part_of(graph, segment):
            return
        further = end - 1 - start
        crossing = segment.crossing[further] if further < len(segment.crossing) else 0
        keeps += crossing
        needs = max(segment.kept, crossing) + max(needs, segment.work + behind[start])
        cost += round(segment.cost * _TICKS) * _TICK + _SEGMENT
        yield _Block(start, end, keeps, needs, cost)


def _is_part_of(graph: str, segment: Segment) -> bool:
    return segment.first.rpartition("/")[0] == graph == segment.last.rpartition("/")[0]


def _sums_behind(sizes: Sequence[int]) -> list[int]:
    """For each segment, the sum over it and those behind it."""
    return list(itertools.accumulate(reversed(sizes)))[::-1]


def _keeps_and_cost(state: _State) -> tuple[int, int]:
    return state[:2]


def _runs_of(state: _State) -> Runs:
    runs = []
    while state.last is not None and state.before is not None:
        runs += [(state.last.start, state.last.end)] if state.last.cost else []
        state = state.before
    return tuple(reversed(runs))
