"""How much memory a tf.data pipeline holds: what each stage keeps between two elements, and the most it has while it
makes one.

Two figures are carried along the chain, like TensorFlow's iterators are stacked: `kept`, what a stage and those before
it hold when nobody asks for an element, and `peak`, the most they hold while one is made, that element included. A
stage with a thread of its own (prefetch, parallel map) works ahead until its buffer is full, and is measured with that.
So the figures are those of a pipeline that is faster than whoever takes its elements.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable

from oomproof.data.pipelines.tf_elements import ELEMENT_OVERHEAD, PART_OVERHEAD, Elements, Part
from oomproof.data.pipelines.tf_stages import AUTOTUNE, Node, size, walk

# tf.data's map_and_batch works on the batch that is asked for and on the next.
_FUSED_BATCHES = 2
_READER_BUFFER = 256 * 2**10
# A parallel interleave, where it is left to TensorFlow: twice its cycle in inputs, twice a block of each.
_AHEAD_BY = 2


@dataclasses.dataclass(frozen=True)
class Settings:
    """What TensorFlow does to a pipeline by itself.

    Attributes:
        rewrites: Whether it is optimised: maps are made parallel and fused with the batch that follows, and a prefetch
            is put at the end.
        cores: Calls in flight where TensorFlow chooses how many.
    """

    rewrites: bool = True
    cores: int = 1


@dataclasses.dataclass(frozen=True)
class Holding:
    """Bytes held at a stage; see above.

    Attributes:
        kept: When nobody asks for an element.
        peak: At most, while one is made.
        sources: What was there before anything ran; counts in both others.
        drains: What a shuffle buffer before it has less for each element that leaves this stage: once the whole dataset
            is in the buffer nothing comes after it.
    """

    kept: int = 0
    peak: int = 0
    sources: int = 0
    drains: int = 0


def settings_of(node: Node) -> Settings:
    wanted = node.dataset.options().experimental_optimization.apply_default_optimizations
    return Settings(rewrites=wanted is not False, cores=len(os.sched_getaffinity(0)))


class Accounts:
    """The books of a pipeline.

    Args:
        end: Where the pipeline ends.
        elements: What an element is at each stage.
        settings: What TensorFlow does by itself.
        counts: Which tensors are counted, for telling memory that comes from one allocator from that of another.
    """

    def __init__(
        self, end: Node, elements: Elements, settings: Settings, counts: Callable[[Part], bool] = lambda _: True
    ) -> None:
        self.elements, self.settings, self.counts = elements, settings, counts
        self.repeats = any(node.kind == "repeat" for node in walk(end))
        # By identity, since nodes are looked at again and again.
        self.unknown: set[int] = set()

    def total(self, node: Node, ends: bool) -> int:
        """Bytes at the peak, with the element that whoever takes them has. `ends`: nothing follows this stage."""
        holding, out = self.at(node), self.size(node)
        if ends and self.settings.rewrites and not self.is_async(node):
            # A prefetch of one element is put at the end of what has no thread of its own.
            holding = _prefetched(holding, out, 1)
        return max(holding.peak, holding.kept + max(0, out - holding.drains))

    def size(self, node: Node) -> int:
        """Bytes of its own that an element has when it leaves this stage."""
        element = self.elements.at(node)
        if element is None:
            self.unknown.add(id(node.dataset))
            return 0
        owned = sum(part.bytes + PART_OVERHEAD for part in element if part.owned and self.counts(part))
        return owned + (ELEMENT_OVERHEAD if self.counts(Part(0, True, "")) else 0)

    def is_async(self, node: Node) -> bool:
        if node.kind in ("options", "pass"):
            return self.is_async(node.inputs[0])
        if node.kind == "prefetch":
            return True
        if node.kind == "batch" and self.is_fused(node):
            return True
        return node.kind in ("map", "batch", "interleave") and self.calls(node) is not None

    def calls(self, node: Node) -> int | None:
        """Calls in flight, `None` for one at a time on the thread that asks."""
        calls = node.parallel_calls
        if calls is None and node.kind == "map" and self.settings.rewrites and node.function and node.function.is_pure:
            calls = AUTOTUNE
        return self.settings.cores if calls == AUTOTUNE else calls

    def is_fused(self, node: Node) -> bool:
        """Whether TensorFlow makes one stage of this batch and the map before it."""
        return (
            self.settings.rewrites
            and node.kind == "batch"
            and node.parallel_calls is None
            and node.inputs[0].kind == "map"
        )

    def at(self, node: Node) -> Holding:
        before = [self.at(each) for each in node.inputs]
        if not before:
            return self._source(node)
        held = self._function(node)
        first = _sum(before)
        first = Holding(first.kept + held, first.peak + held, first.sources + held, first.drains)
        count = getattr(self, f"_{node.kind}", None)
        return count(node, first) if count else first

    def _source(self, node: Node) -> Holding:
        held = 0
        if node.kind in ("tensor_slices", "tensors"):
            held = sum(part.bytes for part in self._tensors(node) if self.counts(part))
        if node.kind == "unknown":
            self.unknown.add(id(node.dataset))
        return Holding(held, held + self.size(node), held)

    def _tensors(self, node: Node) -> list[Part]:
        return [Part(size(tensor), True, tensor.dtype.name) for tensor in node.dataset._tensors]

    def _function(self, node: Node) -> int:
        held = node.function.held if node.function else 0
        return held if self.counts(Part(held, True, "")) else 0

    def _map(self, node: Node, before: Holding) -> Holding:
        taken, made, working = self.size(node.inputs[0]), self.size(node), self._working(node)
        calls = self.calls(node)
        if calls is None:
            return dataclasses.replace(before, peak=max(before.peak, before.kept + taken + working + made))
        # Finished outcomes wait for the one that is asked for. Those not finished have what they work on as well.
        busy = min(calls, self.settings.cores)
        more = max(0, made - before.drains)
        kept = max(before.kept + calls * more, before.peak + (calls - 1) * more, before.kept + busy * (taken + working))
        return dataclasses.replace(before, kept=kept, peak=kept + more)

    def _working(self, node: Node) -> int:
        working = node.function.working if node.function else 0
        return working if self.counts(Part(working, True, "")) else 0

    def _batch(self, node: Node, before: Holding) -> Holding:
        count, taken, made = node.number("_batch_size", 1), self.size(node.inputs[0]), self.size(node)
        if self.is_fused(node):
            below = self.at(node.inputs[0].inputs[0])
            sample = self.size(node.inputs[0].inputs[0]) + self._working(node.inputs[0]) + taken
            held = self._function(node.inputs[0])
            drains = count * below.drains
            kept = below.kept + held + _FUSED_BATCHES * (made - drains) + (self.calls(node.inputs[0]) or 1) * sample
            return Holding(kept, kept + made - drains, below.sources + held, drains)
        taken -= before.drains
        peak = max(before.kept + count * taken + made, before.peak + (count - 1) * taken)
        after = dataclasses.replace(before, peak=peak, drains=count * before.drains)
        calls = self.calls(node)
        return after if calls is None else _prefetched(after, made, calls)

    _padded_batch = _batch

    def _shuffle(self, node: Node, before: Holding) -> Holding:
        buffered, count, taken = node.number("_buffer_size"), node.inputs[0].cardinality, self.size(node.inputs[0])
        whole = 0 <= count <= buffered
        held = ((count if whole else buffered) - 1) * taken
        drains = taken if whole and not self.repeats else 0
        return dataclasses.replace(before, kept=before.kept + held, peak=before.peak + held, drains=drains)

    def _cache(self, node: Node, before: Holding) -> Holding:
        count = node.inputs[0].cardinality
        if node.on_disk:
            return before
        if count < 0:
            self.unknown.add(id(node.dataset))
            return before
        taken = self.size(node.inputs[0])
        # When the cache is full, what was buffered before it is in it. The last element was made beside all others.
        kept = max(before.kept, before.sources + count * taken)
        making = max(0, before.peak - before.kept - taken)
        return Holding(kept, max(before.peak, kept + making), before.sources)

    def _prefetch(self, node: Node, before: Holding) -> Holding:
        size = node.number("_buffer_size")
        # A buffer that TensorFlow sizes itself starts with one element and grows when it is found empty.
        return _prefetched(before, self.size(node), 1 if size == AUTOTUNE else size)

    def _interleave(self, node: Node, before: Holding) -> Holding:
        cycle = node.number("_cycle_length", 1)
        cycle = self.settings.cores if cycle == AUTOTUNE else cycle
        buffered = 0
        if self.calls(node):
            # Inputs that come after those of the cycle are read ahead as well, all of them into buffers of their own.
            ahead, each = (
                node.number("_prefetch_input_elements", AUTOTUNE),
                node.number("_buffer_output_elements", AUTOTUNE),
            )
            cycle += _AHEAD_BY * cycle if ahead == AUTOTUNE else ahead
            files = node.inputs[0].cardinality
            cycle = min(cycle, files) if files >= 0 else cycle
            buffered = cycle * (_AHEAD_BY * max(1, node.number("_block_length", 1)) if each == AUTOTUNE else each)
        made = self.size(node)
        readers = cycle * _READER_BUFFER if self.counts(Part(_READER_BUFFER - 1, True, "")) else 0
        kept = before.kept + buffered * made + readers
        return dataclasses.replace(before, kept=kept, peak=kept + made)

    def _flat_map(self, node: Node, before: Holding) -> Holding:
        return dataclasses.replace(before, peak=before.peak + self.size(node))

    _unbatch = _generator = _reader = _flat_map

    def _unknown(self, node: Node, before: Holding) -> Holding:
        self.unknown.add(id(node.dataset))
        return dataclasses.replace(before, peak=before.peak + self.size(node))


def _prefetched(before: Holding, made: int, count: int) -> Holding:
    if count < 1:
        return before
    more = max(0, made - before.drains)
    kept = max(before.kept + count * more, before.peak + (count - 1) * more)
    return dataclasses.replace(before, kept=kept, peak=kept + more)


def _sum(each: list[Holding]) -> Holding:
    kept, peak, sources, drains = (
        sum(getattr(one, field.name) for one in each) for field in dataclasses.fields(Holding)
    )
    return Holding(kept, peak, sources, drains)
