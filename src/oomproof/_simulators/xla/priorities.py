"""What XLA fuses: the results that are computed again inside whatever reads them, because that is quicker.

XLA has a model of time. It takes the result whose fusion into all that read it saves most, fuses it, looks at its
neighbours again, and goes on until nothing is saved any more. A result is fused into all that read it or into none.
Recomputing costs reading what the result is made from, once for each reader, and arithmetic; it saves a kernel, writing
the result and reading it.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Callable, Sequence

from oomproof._simulators.xla.program import Node, Value

# Time is counted in bytes read or written: how much arithmetic a GPU of today does meanwhile, what starting a kernel
# takes, and the part of the shorter of the two, reading or computing, that takes no time of its own.
_ARITHMETIC_PER_BYTE = 20
_LAUNCH = 3 << 20
_OVERLAP = 0.95
# Clock cycles of an element in float32, as measured for XLA's own model; others take few. What is one operation of the
# framework's and several of XLA's is the sum.
_CYCLES = {
    "add": 7,
    "add_any": 7,
    "sub": 7,
    "div": 19,
    "sqrt": 75,
    "rsqrt": 75,
    "exp": 79,
    "exp2": 79,
    "logistic": 108,
    "log": 166,
    "log1p": 229,
    "expm1": 190,
    "erf": 250,
    "erfc": 500,
    "erf_inv": 400,
    "tanh": 467,
    "pow": 510,
    "sin": 958,
    "cos": 978,
    "random_bits": 600,
}
# The same in float16, where that is more.
_HALF_CYCLES = {"mul": 7, "div": 43, "sqrt": 95, "rsqrt": 95, "exp": 102, "logistic": 155, "tanh": 502}
_FEW_CYCLES = 3
# How often these read their argument.
_MOST_USES = 15
_USES = {"erf": _MOST_USES, "erfc": _MOST_USES}


@dataclasses.dataclass(eq=False)
class _Unit:
    """What is one kernel as long as it is not fused: an operation, and what was fused into it.

    Attributes:
        makes: The result it may be fused for; `None` where it never is.
        reads: Arrays it reads, by `id`.
        uses: How often an element of each is used. What is fused in its place is computed as often.
        cycles: Of one element.
        elements: How often it does that.
        written: Bytes.
    """

    makes: Value | None
    reads: dict[int, Value]
    uses: dict[int, int]
    cycles: int
    elements: int
    written: int

    def time(self) -> float:
        return self._time(self.reads, self.cycles)

    def time_with(self, producer: _Unit) -> float:
        """The time when a producer is part of it."""
        reads = self.reads | producer.reads
        del reads[id(producer.makes)]
        return self._time(reads, self.cycles + producer.cycles * self.uses[id(producer.makes)])

    def _time(self, reads: dict[int, Value], cycles: int) -> float:
        # Of what is sliced or gathered from, only that.
        sizes = (min(value.size, self.elements * (value.size // max(1, value.elements))) for value in reads.values())
        computing, moving = cycles * self.elements / _ARITHMETIC_PER_BYTE, sum(sizes) + self.written
        return computing + moving - _OVERLAP * min(computing, moving)

    def take(self, producer: _Unit, repeated: bool) -> None:
        """Makes a producer part of it.

        Args:
            producer: What makes one of the arrays it reads.
            repeated: Whether what the producer reads is used once more for each use of its result.
        """
        key = id(producer.makes)
        times = self.uses.pop(key)
        del self.reads[key]
        self.cycles += producer.cycles * times
        self.reads.update(producer.reads)
        for read, uses in producer.uses.items():
            again = self.uses.get(read, 0) + uses * times
            self.uses[read] = min(again, _MOST_USES) if repeated else max(uses, self.uses.get(read, 1))


def fused(nodes: Sequence[Node], sources: Callable[[Node], list[Value]], fusible: Callable[[Value], bool]) -> set[int]:
    """The results, by `id`, that take no memory.

    Args:
        nodes: What is computed.
        sources: What an operation reads.
        fusible: Whether a result may be computed again wherever it is read.
    """
    return _Queue(nodes, sources, fusible).run()


class _Queue:
    def __init__(
        self, nodes: Sequence[Node], sources: Callable[[Node], list[Value]], fusible: Callable[[Value], bool]
    ) -> None:
        self._makers: dict[int, _Unit] = {}
        self._readers: dict[int, dict[int, _Unit]] = {}
        self._fused: set[int] = set()
        self._reshaped = _reshaped(nodes)
        for node in nodes:
            reads = sources(node)
            choices = [value for value in node.outputs if fusible(value)]
            units = [_unit(node, [value], reads, value) for value in choices]
            rest = [value for value in node.outputs if value not in choices]
            if rest:
                units.append(_unit(node, rest, reads, None))
            for unit in units:
                if unit.makes is not None:
                    self._makers[id(unit.makes)] = unit
                for value in reads:
                    self._readers.setdefault(id(value), {})[id(unit)] = unit

    def run(self) -> set[int]:
        gains = {key: self._gain(unit) for key, unit in self._makers.items()}
        heap = [(-gain, number, key) for number, (key, gain) in enumerate(gains.items()) if gain >= 0]
        numbers = {key: number for number, key in enumerate(gains)}
        heapq.heapify(heap)
        while heap:
            gain, _, key = heapq.heappop(heap)
            if key in self._fused or -gain != gains[key]:
                continue
            for other in self._fuse(key):
                gains[other] = self._gain(self._makers[other])
                if gains[other] >= 0:
                    heapq.heappush(heap, (-gains[other], numbers[other], other))
        return self._fused

    def _gain(self, unit: _Unit) -> float:
        readers = self._readers.get(id(unit.makes), {}).values()
        if not readers:
            return -1
        return _LAUNCH + unit.time() + sum(reader.time() - reader.time_with(unit) for reader in readers)

    def _fuse(self, key: int) -> set[int]:
        """Makes a result part of all that read it. Returns the results whose gains have changed."""
        producer = self._makers[key]
        self._fused.add(key)
        changed: set[int] = set()
        for value in producer.reads.values():
            self._readers[id(value)].pop(id(producer))
        for reader in self._readers.pop(key).values():
            reader.take(producer, key in self._reshaped)
            for value in producer.reads.values():
                self._readers[id(value)][id(reader)] = reader
            changed.update(reader.reads)
            changed.add(id(reader.makes))
        return {key for key in changed if key in self._makers and key not in self._fused}


def _reshaped(nodes: Sequence[Node]) -> set[int]:
    """Results, by `id`, between which and what they are made from XLA has reshapes: it multiplies matrices.

    Behind a reshape XLA does not see that the same element is used twice.
    """
    found: set[int] = set()
    for node in nodes:
        product = node.name == "dot_general" and any(len(value.shape) > 2 for value in _of_its_size(node.outputs[0]))
        if product or any(id(value) in found for value in node.inputs):
            found.update(map(id, node.outputs))
    return found


def _of_its_size(value: Value) -> list[Value]:
    """A result, and what is as large as it of what reads it: there its shape is seen."""
    return [value, *(made for user in value.users for made in user.outputs if made.elements == value.elements)]


def _unit(node: Node, outputs: list[Value], reads: list[Value], makes: Value | None) -> _Unit:
    elements = max((value.elements for value in outputs), default=1)
    if makes is None:
        # Reductions go through all they read.
        elements = max([elements, *(value.elements for value in reads)])
    cycles = _CYCLES.get(node.name, _FEW_CYCLES)
    if outputs and outputs[0].dtype in ("float16", "f16"):
        cycles = _HALF_CYCLES.get(node.name, cycles)
    uses = {id(value): _USES.get(node.name, 1) for value in reads}
    return _Unit(makes, {id(v): v for v in reads}, uses, cycles, elements, sum(value.size for value in outputs))
