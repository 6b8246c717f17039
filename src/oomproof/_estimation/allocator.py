"""A traced step replayed through the allocator that would run it: what is in use, and when it is most.

Three sets of rules: TensorFlow's and JAX's allocator (BFC), torch's caching allocator with segments that are fixed or
grow, and XLA's plan, which puts everything temporary into one block.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from oomproof._records.trace import Buffer, Trace

_MIB = 2**20
# Of a block that is less than twice what is asked for, TensorFlow's and JAX's allocator splits off no less than this.
UNSPLIT = 128 * _MIB
# The size of a segment that nothing is too large for.
ENDLESS = 2**60


@dataclasses.dataclass(frozen=True)
class Replay:
    """What became of a trace.

    Attributes:
        peak: Bytes in use when they are most, as the framework itself reports them.
        reserved: Bytes the allocator needs from the device for that, fragments included.
        at: The op during which they are most.
        live: What was allocated then.
        timeline: Bytes in use during each op.
    """

    peak: int
    reserved: int
    at: int
    live: tuple[Buffer, ...]
    timeline: tuple[int, ...]


def replay(trace: Trace) -> Replay:
    """Runs the allocations of a step as the trace's allocator would."""
    return _planned(trace) if trace.allocator == "xla" else _one_by_one(trace, Heap(RULES[trace.allocator]))


def goes_through(trace: Trace, limit: int) -> bool:
    """Whether torch's allocator, with so many bytes, has room for each allocation of a step when it comes."""
    try:
        _one_by_one(trace, Heap(RULES[trace.allocator], limit))
    except _FullError:
        return False
    return True


def _up(size: int, unit: int) -> int:
    return -(-size // unit) * unit


@dataclasses.dataclass(frozen=True)
class Rules:
    """How an allocator that serves one request after the other decides.

    Attributes:
        unit: Sizes are rounded up to a multiple of it.
        segment: How much it takes from the device for a request that fits nowhere.
        pool: Blocks are given only to requests of their segment's pool.
        splits: Whether of a block of the first size, asked for the second, the rest is kept apart.
        grows: Whether the first segment is as large as `segment` says, and each after it twice as large as the last,
            or as often twice as a request needs.
        page: Of segments without end, by pool: in which units memory is taken for the parts that are used.
    """

    unit: int
    segment: Callable[[int], int]
    pool: Callable[[int], int]
    splits: Callable[[int, int], bool]
    grows: bool = False
    page: Callable[[int], int] | None = None


# One region from the start, that nothing is too large for. A block that is not split counts as used whole.
_BFC = Rules(
    unit=256,
    segment=lambda size: ENDLESS,
    pool=lambda size: 0,
    splits=lambda block, size: block >= 2 * size or block - size >= UNSPLIT,
)
RULES = {
    "bfc": _BFC,
    # TensorFlow's for CPUs: what is left at the end of each region is handed out whole.
    "bfc-growing": dataclasses.replace(_BFC, segment=lambda size: 2 * _MIB, grows=True),
    "caching": Rules(
        unit=512,
        segment=lambda size: 2 * _MIB if size <= _MIB else 20 * _MIB if size < 10 * _MIB else _up(size, 2 * _MIB),
        pool=lambda size: int(size > _MIB),
        splits=lambda block, size: block - size >= 512 if size <= _MIB else block - size > _MIB,
    ),
    "expandable": Rules(
        unit=512,
        segment=lambda size: ENDLESS,
        pool=lambda size: int(size > _MIB),
        splits=lambda block, size: block - size >= 512,
        page=lambda pool: (20 if pool else 2) * _MIB,
    ),
}


class _Block:
    """A part of a segment, free or in use, between its neighbours."""

    __slots__ = ("after", "before", "free", "pool", "segment", "size", "start")

    def __init__(self, segment: int, pool: int, start: int, size: int) -> None:
        self.segment, self.pool, self.start, self.size = segment, pool, start, size
        self.free = True
        self.before: _Block | None = None
        self.after: _Block | None = None


class _FullError(Exception):
    """There is no room for another segment."""


class Heap:
    """Serves requests one after the other: the smallest free block that fits, split or whole, else a new segment.

    Args:
        rules: How.
        limit: Bytes there are. Segments that nobody uses are given back before it is said that there are no more.

    Attributes:
        in_use: Bytes of the blocks that are handed out.
    """

    def __init__(self, rules: Rules, limit: int | None = None) -> None:
        self.rules = rules
        self._limit = limit
        self.in_use = 0
        # Of each segment, what was taken from the device; of the endless one, how far it was ever used.
        self._taken: dict[int, int] = {}
        # Of each page that was taken: its size, and how many blocks in use touch it.
        self._pages: dict[tuple[int, int], list[int]] = {}
        # The free blocks of each pool, by size and, where sizes are the same, by address.
        self._free: dict[int, list[tuple[int, int, int, _Block]]] = {}
        self._count = 0
        self._next = 0

    @property
    def reserved(self) -> int:
        """Bytes taken from the device."""
        return sum(self._taken.values()) + sum(size for size, _ in self._pages.values())

    def take(self, size: int) -> _Block:
        size = _up(max(1, size), self.rules.unit)
        pool = self.rules.pool(size)
        free = self._free.setdefault(pool, [])
        place = bisect.bisect_left(free, (size,))
        if place == len(free):
            self._new_segment(self._segment(size), pool)
            free = self._free[pool]
            place = bisect.bisect_left(free, (size,))
        block = free.pop(place)[-1]
        block.free = False
        if self.rules.splits(block.size, size):
            self._split(block, size)
        self.in_use += block.size
        if self.rules.page is not None:
            self._take_pages(block)
        else:
            self._taken[block.segment] = max(self._taken[block.segment], block.start + block.size)
        return block

    def give(self, block: _Block) -> None:
        self.in_use -= block.size
        if self.rules.page is not None:
            for page in self._pages_of(block):
                self._pages[page][1] -= 1
        if block.after is not None and block.after.free:
            self._merge(block, block.after)
        if block.before is not None and block.before.free:
            block = block.before
            self._free_list_without(block)
            self._merge(block, block.after)
        self._keep(block)

    def _segment(self, size: int) -> int:
        if not self.rules.grows:
            return self.rules.segment(size)
        planned = self._next or self.rules.segment(size)
        found = planned
        while found < size:
            found *= 2
        self._next = found if found > planned else 2 * found
        return found

    def _pages_of(self, block: _Block) -> list[tuple[int, int]]:
        assert self.rules.page is not None
        size = self.rules.page(block.pool)
        return [(block.segment, at) for at in range(block.start // size, -(-(block.start + block.size) // size))]

    def _take_pages(self, block: _Block) -> None:
        assert self.rules.page is not None
        before = len(self._pages)
        for page in self._pages_of(block):
            self._pages.setdefault(page, [self.rules.page(block.pool), 0])[1] += 1
        if self._limit is not None and len(self._pages) > before and self.reserved > self._limit:
            self._pages = {page: taken for page, taken in self._pages.items() if taken[1]}
            if self.reserved > self._limit:
                raise _FullError

    def _new_segment(self, size: int, pool: int) -> None:
        if self._limit is not None and size != ENDLESS and self.reserved + size > self._limit:
            self._give_back()
            if self.reserved + size > self._limit:
                raise _FullError
        self._count += 1
        self._taken[self._count] = 0 if size == ENDLESS else size
        self._keep(_Block(self._count, pool, 0, size))

    def _give_back(self) -> None:
        for pool, free in self._free.items():
            unused = [entry for entry in free if entry[-1].before is None and entry[-1].after is None]
            for *_, block in unused:
                del self._taken[block.segment]
            self._free[pool] = [entry for entry in free if entry not in unused]

    def _split(self, block: _Block, size: int) -> None:
        rest = _Block(block.segment, block.pool, block.start + size, block.size - size)
        rest.before, rest.after = block, block.after
        if rest.after is not None:
            rest.after.before = rest
        block.after, block.size = rest, size
        self._keep(rest)

    def _merge(self, block: _Block, after: _Block | None) -> None:
        assert after is not None
        if after.free:
            self._free_list_without(after)
        block.size += after.size
        block.after = after.after
        if block.after is not None:
            block.after.before = block

    def _keep(self, block: _Block) -> None:
        block.free = True
        bisect.insort(self._free[block.pool], (block.size, block.segment, block.start, block))

    def _free_list_without(self, block: _Block) -> None:
        free = self._free[block.pool]
        del free[bisect.bisect_left(free, (block.size, block.segment, block.start))]


def _one_by_one(trace: Trace, heap: Heap) -> Replay:
    count = max(1, len(trace.ops))
    begins: list[list[int]] = [[] for _ in range(count)]
    later: list[list[int]] = [[] for _ in range(count)]
    ends: list[list[int]] = [[] for _ in range(count)]
    blocks: dict[int, _Block] = {}
    for index, buffer in enumerate(trace.buffers):
        if buffer.start >= 0:
            begins[buffer.start].append(index)
        elif buffer.first >= 0:
            later[buffer.first].append(index)
        else:
            blocks[index] = _made(buffer, heap)
        if buffer.end < count:
            ends[buffer.end].append(index)
    timeline: list[int] = []
    # Twice: the second step finds the memory as the first one left it.
    for step in range(2):
        timeline = []
        for op in range(count):
            for index in (*begins[op], *(later[op] if step == 0 else ())):
                blocks[index] = heap.take(trace.buffers[index].size)
            timeline.append(heap.in_use)
            for index in ends[op]:
                heap.give(blocks.pop(index))
        if step == 0:
            _hand_over(trace, blocks, heap)
    at = int(np.argmax(timeline))
    return Replay(timeline[at], heap.reserved, at, _live(trace, at), tuple(timeline))


def _hand_over(trace: Trace, blocks: dict[int, _Block], heap: Heap) -> None:
    """What a step leaves behind is what the next one finds: new values of weights, gradients it will let go of."""
    left: dict[tuple[object, ...], list[_Block]] = {}
    for index in [index for index in blocks if trace.buffers[index].start >= 0]:
        left.setdefault(_alike(trace.buffers[index]), []).append(blocks.pop(index))
    for index, buffer in enumerate(trace.buffers):
        if buffer.start < 0 and index not in blocks:
            same = left.get(_alike(buffer))
            blocks[index] = same.pop(0) if same else heap.take(buffer.size)
    for block in (block for unclaimed in left.values() for block in unclaimed):
        heap.give(block)


def _alike(buffer: Buffer) -> tuple[object, ...]:
    return buffer.size, buffer.category, buffer.layer


def _made(buffer: Buffer, heap: Heap) -> _Block:
    """Its place, taken as when it was made: what was needed for that leaves gaps, which others get in part."""
    needed = [heap.take(buffer.size) for _ in range(2 * buffer.drawn)]
    block = heap.take(buffer.size)
    for each in reversed(needed):
        heap.give(each)
    return block


def _live(trace: Trace, op: int) -> tuple[Buffer, ...]:
    return tuple(buffer for buffer in trace.buffers if buffer.start <= op <= buffer.end)


def _planned(trace: Trace) -> Replay:
    """XLA knows all lives in advance: arguments and results have their places, the rest shares one block."""
    count = max(1, len(trace.ops))
    lasting = [b for b in trace.buffers if b.start < 0 or b.end >= count]
    temporary = [b for b in trace.buffers if b.start >= 0 and b.end < count]
    base = sum(_up(max(1, b.size), 256) for b in lasting)
    changes = np.zeros(count + 1, dtype=np.int64)
    for buffer in temporary:
        size = _up(max(1, buffer.size), 256)
        changes[buffer.start] += size
        changes[buffer.end + 1] -= size
    timeline = base + np.cumsum(changes[:-1])
    at = int(np.argmax(timeline))
    sizes = [_up(max(1, buffer.size), 256) for buffer in temporary]
    peak = base + max((place + size for place, size in zip(places(temporary), sizes, strict=True)), default=0)
    return Replay(peak, peak, at, _live(trace, at), tuple(int(size) for size in timeline))


def places(buffers: Sequence[Buffer]) -> list[int]:
    """Where each lies in a block in which all have a place for their time: largest first, each where it fits best."""
    order = sorted(range(len(buffers)), key=lambda index: (-buffers[index].size, buffers[index].start))
    sizes = np.array([_up(max(1, buffers[index].size), 256) for index in order], dtype=np.int64)
    starts = np.array([buffers[index].start for index in order])
    ends = np.array([buffers[index].end for index in order])
    found = np.zeros(len(order), dtype=np.int64)
    for rank in range(len(order)):
        meets = np.flatnonzero((starts[:rank] <= ends[rank]) & (ends[:rank] >= starts[rank]))
        meets = meets[np.argsort(found[meets], kind="stable")]
        # The gaps between what is there already, the last one endless.
        tops = np.maximum.accumulate(np.concatenate([[0], found[meets] + sizes[meets]]))
        gaps = np.concatenate([found[meets], [ENDLESS]]) - tops
        fitting = np.flatnonzero(gaps >= sizes[rank])
        found[rank] = tops[fitting[np.argmin(gaps[fitting])]]
    return [int(place) for _, place in sorted(zip(order, found, strict=True))]
