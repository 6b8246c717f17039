"""In which order kernels run, and from when to when their results take memory."""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Iterator, Sequence

from oomproof._simulators.xla.kernels import Kernel


def padded(size: int) -> int:
    return -(-size // 256) * 256


@dataclasses.dataclass(frozen=True)
class Plan:
    """An order, and the memory it takes.

    Attributes:
        kernels: In the order they run.
        spans: First and last kernel during which each result has memory of its own, by `id`.
        peak: Bytes of results, scratch and workspaces when they are most.
        known: The same without workspaces, which no plan made without the GPU knows.
    """

    kernels: list[Kernel]
    spans: dict[int, tuple[int, int]]
    peak: int
    known: int


def planned(kernels: Sequence[Kernel], settled: set[int]) -> Plan:
    """The best of the orders XLA tries.

    Args:
        kernels: In the program's order.
        settled: Results, by `id`, that are written over the state, and take no memory.
    """
    orders = [list(kernels), _eager(kernels, settled), _listed(kernels, settled)]
    return min((_plan(order, settled) for order in orders), key=lambda plan: plan.peak)


def in_order(kernels: Sequence[Kernel]) -> Plan:
    """The program's own order, each result with memory of its own."""
    return _plan(list(kernels), set())


def _plan(kernels: list[Kernel], settled: set[int]) -> Plan:
    spans: dict[int, tuple[int, int]] = {}
    sizes: dict[int, int] = {}
    last = len(kernels) - 1
    for index, kernel in enumerate(kernels):
        for value in kernel.makes:
            if id(value) not in settled:
                spans[id(value)] = (index, last + 1 if value.returned else index)
                sizes[id(value)] = padded(value.size)
        for value in kernel.reads:
            if id(value) in spans:
                start, end = spans[id(value)]
                spans[id(value)] = (start, max(end, index))
    for index, kernel in enumerate(kernels):
        free = [v for v in kernel.in_place if id(v) in spans and spans[id(v)][0] < index == spans[id(v)][1]]
        for value in kernel.makes:
            taken = next((v for v in free if v.size == value.size), None)
            if taken is not None and id(value) not in settled:
                free.remove(taken)
                spans[id(taken)] = (spans[id(taken)][0], index - 1)
    change = [0] * (len(kernels) + 2)
    for key, (start, end) in spans.items():
        change[start] += sizes[key]
        change[min(end, last) + 1] -= sizes[key]
    peak = known = used = 0
    for index, kernel in enumerate(kernels):
        used += change[index]
        known = max(known, used + kernel.scratch)
        peak = max(peak, used + kernel.scratch + kernel.node.workspace)
    return Plan(kernels, spans, peak, known)


class _Waiting:
    """Which kernels wait for the results of others, as they run one after the other.

    Attributes:
        ready: Kernels that wait for none.
    """

    def __init__(self, kernels: Sequence[Kernel]) -> None:
        makers = {id(value): index for index, kernel in enumerate(kernels) for value in kernel.makes}
        self._waiting: list[list[int]] = [[] for _ in kernels]
        self._counts = [0] * len(kernels)
        for index, kernel in enumerate(kernels):
            before = {makers[id(value)] for value in kernel.reads if id(value) in makers}
            self._counts[index] = len(before)
            for other in before:
                self._waiting[other].append(index)
        self.ready = [index for index, count in enumerate(self._counts) if count == 0]

    def ran(self, index: int) -> Iterator[int]:
        """The kernels that waited for this one alone."""
        for other in self._waiting[index]:
            self._counts[other] -= 1
            if self._counts[other] == 0:
                yield other


class _Unread:
    """Who is still to read each result, as kernels run one after the other."""

    def __init__(self, kernels: Sequence[Kernel]) -> None:
        self._readers: dict[int, list[int]] = {id(value): [] for kernel in kernels for value in kernel.makes}
        for index, kernel in enumerate(kernels):
            for value in kernel.reads:
                if id(value) in self._readers:
                    self._readers[id(value)].append(index)
        self._uses = {key: len(readers) for key, readers in self._readers.items()}

    def freed_by(self, kernel: Kernel) -> int:
        """Bytes that nobody needs once the kernel has run."""
        return sum(value.size for value in kernel.reads if self._uses.get(id(value)) == 1 and not value.returned)

    def ran(self, kernel: Kernel) -> Iterator[int]:
        """The readers of results of which one reader is left."""
        for value in kernel.reads:
            if id(value) in self._uses:
                self._uses[id(value)] -= 1
                if self._uses[id(value)] == 1:
                    yield from self._readers[id(value)]


def _eager(kernels: Sequence[Kernel], settled: set[int]) -> list[Kernel]:
    """The program's order, except that what writes the state and nothing else runs as soon as it can."""
    waiting = _Waiting(kernels)
    final = [all(id(value) in settled for value in kernel.makes) for kernel in kernels]
    ready = [(not final[index], index) for index in waiting.ready]
    heapq.heapify(ready)
    order = []
    while ready:
        _, index = heapq.heappop(ready)
        order.append(kernels[index])
        for other in waiting.ran(index):
            heapq.heappush(ready, (not final[other], other))
    return order


def _listed(kernels: Sequence[Kernel], settled: set[int]) -> list[Kernel]:
    """Always next what frees most, or takes least."""
    waiting, unread = _Waiting(kernels), _Unread(kernels)

    def growth(index: int) -> int:
        kernel = kernels[index]
        return sum(value.size for value in kernel.makes if id(value) not in settled) - unread.freed_by(kernel)

    # The growth of each that is ready. Of what it was before, entries are left in the heap.
    current = {index: growth(index) for index in waiting.ready}
    ready = [(most, index) for index, most in current.items()]
    heapq.heapify(ready)
    order: list[Kernel] = []
    while ready:
        growing, index = heapq.heappop(ready)
        if current.get(index) != growing:
            continue
        del current[index]
        order.append(kernels[index])
        changed = set(waiting.ran(index))
        changed.update(reader for reader in unread.ran(kernels[index]) if reader in current)
        for other in changed:
            current[other] = growth(other)
            heapq.heappush(ready, (current[other], other))
    return order
