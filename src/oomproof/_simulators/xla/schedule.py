"""In which order kernels run, and from when to when their results take memory."""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Sequence

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


def _graph(kernels: Sequence[Kernel]) -> tuple[dict[int, int], list[list[int]], list[int]]:
    """Who makes a value; who waits for each kernel; for how many others each waits."""
    makers = {id(value): index for index, kernel in enumerate(kernels) for value in kernel.makes}
    waiting: list[list[int]] = [[] for _ in kernels]
    counts = [0] * len(kernels)
    for index, kernel in enumerate(kernels):
        before = {makers[id(value)] for value in kernel.reads if id(value) in makers}
        counts[index] = len(before)
        for other in before:
            waiting[other].append(index)
    return makers, waiting, counts


def _eager(kernels: Sequence[Kernel], settled: set[int]) -> list[Kernel]:
    """The program's order, except that what writes the state and nothing else runs as soon as it can."""
    _, waiting, counts = _graph(kernels)
    final = [all(id(value) in settled for value in kernel.makes) for kernel in kernels]
    ready = [(not final[i], i) for i, count in enumerate(counts) if count == 0]
    heapq.heapify(ready)
    order = []
    while ready:
        _, index = heapq.heappop(ready)
        order.append(kernels[index])
        for other in waiting[index]:
            counts[other] -= 1
            if counts[other] == 0:
                heapq.heappush(ready, (not final[other], other))
    return order


def _listed(kernels: Sequence[Kernel], settled: set[int]) -> list[Kernel]:
    """Always next what frees most, or takes least."""
    makers, waiting, counts = _graph(kernels)
    uses: dict[int, int] = {}
    readers: dict[int, list[int]] = {}
    for index, kernel in enumerate(kernels):
        for value in kernel.reads:
            if id(value) in makers:
                uses[id(value)] = uses.get(id(value), 0) + 1
                readers.setdefault(id(value), []).append(index)

    def gain(index: int) -> int:
        kernel = kernels[index]
        freed = sum(v.size for v in kernel.reads if uses.get(id(v)) == 1 and not v.returned)
        return freed - sum(v.size for v in kernel.makes if id(v) not in settled)

    ready = [(-gain(i), i) for i, count in enumerate(counts) if count == 0]
    heapq.heapify(ready)
    current = {i: priority for priority, i in ready}
    order: list[Kernel] = []
    while ready:
        priority, index = heapq.heappop(ready)
        if current.get(index) != priority:
            continue
        del current[index]
        order.append(kernels[index])
        touched = set()
        for other in waiting[index]:
            counts[other] -= 1
            if counts[other] == 0:
                touched.add(other)
        for value in kernels[index].reads:
            if id(value) in uses:
                uses[id(value)] -= 1
                if uses[id(value)] == 1:
                    touched.update(i for i in readers[id(value)] if i in current)
        for other in touched:
            current[other] = -gain(other)
            heapq.heappush(ready, (current[other], other))
    return order
