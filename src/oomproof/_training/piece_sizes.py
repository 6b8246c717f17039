"""Which piece size to try next: a pure function of what was measured.

A step that splits its batch needs about `fixed + slope × piece` bytes. Two measured sizes give both numbers,
one gives an upper bound for larger pieces (fixed cost taken for slope). Every failed request costs a wait of
ten seconds in TensorFlow's allocator, so sizes are computed, not searched for.

Sizes are whole numbers in any unit; the driver counts in bytes of samples.
"""

from __future__ import annotations

import dataclasses
import math

# Allocators lose a few percent to rounding and gaps, and peaks are only nearly linear in the piece size.
HEADROOM = 0.93
# A budget is a promise where a device limit is only a wall. On a CPU more is kept free below it: TensorFlow's threads
# run the operations of a graph side by side and in different orders, and no allocator that is full makes them wait. Of
# 12 random models, whole and in quarters, the largest of 12 equal steps took up to 1.18 times what the first took, most
# of them up to 1.05 times (python benchmarks/peak_spread.py --seed 1 --count 12). A step in pieces was seen to take
# 1.18 times what was computed from smaller ones (unseen.py --seed 1 --only 9:0.5 --as-budget), and 1.35 times in one of
# ten runs of test_no_step_goes_over_the_budget, whose 12 MB were then exceeded with 0.86, 0.8 and 0.76.
CPU_BUDGET_HEADROOM = 0.7
# Of a size that failed, the share that is tried next at most, after one failure, two, and more.
_BELIEF = (0.9, 0.75, 0.5)
# A size that once failed comes back only when this much more memory is free than when it failed.
MORE_ROOM = 1.15


@dataclasses.dataclass(frozen=True)
class Failure:
    """A piece size that ran out of memory, and how much was free for it (`None`: unknown)."""

    size: int
    free: int | None


@dataclasses.dataclass(frozen=True)
class Evidence:
    """What is known of one phase (train, test or predict): bytes needed by size, and failures."""

    needs: tuple[tuple[int, int], ...] = ()
    failures: tuple[Failure, ...] = ()
    # Sizes that went through, and in how much: (size, bytes), those that say more than the others.
    passes: tuple[tuple[int, int], ...] = ()

    def with_need(self, size: int, need: int) -> Evidence:
        """Adds a measurement. Of several at nearly one size the largest counts, so their number stays small."""
        kept = [(s, n) for s, n in self.needs if not _close(s, size)]
        size, need = max([(size, need), *((s, n) for s, n in self.needs if _close(s, size))], key=lambda pair: pair[1])
        return dataclasses.replace(self, needs=tuple(sorted([*kept, (size, need)])))

    def upto(self, size: int) -> Evidence:
        """Only what was measured at this size or below."""
        return dataclasses.replace(self, needs=tuple((s, need) for s, need in self.needs if s <= size))

    def measured(self, size: int) -> bool:
        """Whether this size, or one that is as good as the same, has been measured."""
        return any(_close(s, size) for s, _ in self.needs)

    def with_failure(self, size: int, free: int | None) -> Evidence:
        passes = tuple((s, f) for s, f in self.passes if s < size)
        return dataclasses.replace(self, failures=(*self.failures, Failure(size, free)), passes=passes)

    def with_pass(self, size: int, took: int) -> Evidence:
        """Adds that a size went through and took no more than that."""
        if self.passed(size, took):
            return self
        kept = [(s, t) for s, t in self.passes if s > size or t < took]
        return dataclasses.replace(self, passes=(*kept, (size, took)))

    def passed(self, size: int, free: int) -> bool:
        """Whether this size has gone through in no more than that.

        Other steps of this size may have taken more: where there is room, more is run side by side, and read ahead.
        """
        return any(size <= s and took <= free for s, took in self.passes)

    def forgiven(self, size: int) -> Evidence:
        """Without failures at this size and below: it is to be tried once more."""
        return dataclasses.replace(self, failures=tuple(f for f in self.failures if f.size > size))

    def failed_at(self, size: int) -> bool:
        """Whether this size failed, and no size has gone through yet."""
        return not self.needs and any(failure.size <= size for failure in self.failures)

    def predict(self, size: int, bound: bool = True) -> int | None:
        """Bytes a piece of `size` needs, or `None` with nothing measured.

        Without `bound`, also `None` where all that is known is how much it needs at most.
        """
        for known, need in self.needs:
            if _close(known, size):
                return need
        line = self._line()
        if line is None or (line[0] == 0.0 and not bound):
            return None
        fixed, slope = line
        return int(fixed + slope * size)

    def expecting(self, size: int, need: int) -> Evidence:
        """With what a plan says of a larger size, where what was measured only bounds it, and does not deny it."""
        if not self.needs or self._grown() or size <= self.needs[-1][0] or need < self.needs[-1][1]:
            return self
        return dataclasses.replace(self, needs=(self.needs[-1], (size, need)))

    def largest(self, free: int, upto: int, headroom: float = HEADROOM) -> int | None:
        """The largest size that should fit in `free` bytes, 0 if none does, `None` with nothing measured."""
        line = self._line()
        if line is None:
            return None
        fixed, slope = line
        fitting = min(upto, int((free * headroom - fixed) / slope))
        # A size that was measured needs less headroom than one that was computed.
        proven = max(
            (size for size, need in self.needs if size <= upto and need <= free * (1 + headroom) / 2), default=0
        )
        gone = max((size for size, took in self.passes if size <= upto and took <= free), default=0)
        return self._below_failures(max(fitting, proven, gone, 0), free)

    def _line(self) -> tuple[float, float] | None:
        """(fixed, slope) through the largest size measured and one of at most half of it, where there is one.

        With only one to go by, or when the smaller one needed as much (temporary buffers of a fixed size hide the
        slope), all of it counts as slope. That is an upper bound for larger pieces.
        """
        if not self.needs:
            return None
        size, need = self.needs[-1]
        slope = self._grown()
        if slope is not None and need - slope * size >= 0:
            return need - slope * size, slope
        return 0.0, max(need, 1) / size

    def _grown(self) -> float | None:
        """By how much a byte of data the need grew up to the largest size; `None` where that is not to be seen."""
        size, need = self.needs[-1]
        lower = [(s, n) for s, n in self.needs if s <= size / 2]
        if not lower or need <= lower[-1][1] * 1.1:
            return None
        return (need - lower[-1][1]) / (size - lower[-1][0])

    def _below_failures(self, size: int, free: int) -> int:
        for failure in self.failures:
            if size >= failure.size and (failure.free is None or free < failure.free * MORE_ROOM):
                # After a second failure the measurements are known to promise too much.
                share = 0.9 if len(self.failures) == 1 else 0.75
                size = min(size, int(failure.size * share), failure.size - 1)
        return max(size, 0)


def _close(a: int, b: int) -> bool:
    return abs(a - b) <= 0.03 * max(a, b)


def next_probe(
    evidence: Evidence,
    free: int,
    batch: int,
    sample: int,
    headroom: float,
    *,
    fixed: int = 0,
    bold: bool = True,
    expected: tuple[int, int] | None = None,
) -> int | None:
    """The next size to measure before a plan is made, or `None` when enough is known.

    Starts at one sample, of size `sample`. What one size needs, beyond the `fixed` part, bounds what a larger one can
    need (in proportion), so the next size is as large as that bound allows. Where most of the need turns out to be
    fixed the bound allows nothing; a `bold` search then goes by the growth so far, in small steps. The one risk it
    takes is to try two samples where one needs more than half of what there is. A search that is not bold goes by what
    a plan says that a size needs (`expected`), if there is one. Where a size it tried has failed, it looks between that
    and what went through: one sample says little of a model that is mostly weights.
    """
    if not evidence.needs:
        return sample
    size, need = evidence.needs[-1]
    if tried := [failure.size for failure in evidence.failures if size < failure.size < batch]:
        between = math.isqrt(size * min(tried)) // sample * sample
        return between if between >= size * 1.5 else None
    room = free * headroom
    fixed = min(fixed, need - 1)
    candidate = size * (room - fixed) // max(need - fixed, 1) // sample * sample
    if (bold or expected is not None) and candidate < 1.5 * size and need < room:
        candidate = _beyond(evidence, room, bold, expected)
    candidate = min(int(candidate), batch // 2) // sample * sample
    return candidate if candidate >= size * 1.5 else None


def _beyond(evidence: Evidence, room: float, bold: bool, expected: tuple[int, int] | None) -> float:
    """A size to try that what was measured does not promise to fit: by the growth so far, or by what a plan expects."""
    size, need = evidence.needs[-1]
    if len(evidence.needs) > 1:
        previous, less = evidence.needs[-2]
        grown, by = need - less, size - previous
    elif expected is not None and expected[0] > size:
        grown, by = expected[1] - need, expected[0] - size
    else:
        return 2 * size if bold else size
    slope = max(grown, 0.01 * need) * 1.5 / by
    return min(4 * size, size + (room - need) / slope)


def smaller(
    evidence: Evidence, failed: int, free: int | None, headroom: float = HEADROOM, least: int = 1
) -> int | None:
    """The next size after `failed` ran out of memory: strictly smaller, `None` when there is none."""
    if failed <= least:
        return None
    guess = None if free is None else evidence.largest(free, failed - least, headroom)
    # Measurements that promised what then failed are believed less each time: creeping down costs a wait per step.
    share = _BELIEF[min(len(evidence.failures), len(_BELIEF)) - 1] if evidence.failures else 1.0
    return max(least, min(failed // 2 if guess is None else guess, int(failed * share), failed - least))


def larger(evidence: Evidence, current: int, free: int, batch: int, headroom: float = HEADROOM) -> int | None:
    """A size worth growing to, or `None`. Small gains are left alone: each change risks a failed step."""
    guess = evidence.largest(free, batch, headroom)
    if guess is None or guess < min(batch, current * 1.25):
        return None
    return guess if guess > current else None
