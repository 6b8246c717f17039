"""`tune` of a tf.data pipeline: its stages as a list, changed one thing at a time, and built again.

Nothing is changed that could change an element or its place. What draws random numbers, calls Python or is not known
stays where it is and as it is.
"""

from __future__ import annotations

import dataclasses
import pathlib
import shutil
import uuid
from typing import Any

from oomproof._records.units import format_bytes
from oomproof.data.pipelines.tf_audit import audit_tf
from oomproof.data.pipelines.tf_elements import Elements
from oomproof.data.pipelines.tf_memory import Accounts, settings_of
from oomproof.data.pipelines.tf_rebuild import CannotRebuildError, Changes, again
from oomproof.data.pipelines.tf_stages import AUTOTUNE, Node, chain_of, walk
from oomproof.data.tuning import Tuning

_MIB = 2**20
_PREFETCH = 2
_AIM = 0.95
# A cache that is added leaves this share of the budget to everything else.
_MOST_FOR_CACHE = 0.6
# Stages that can be run again and give the same, if their functions do.
_REPEATABLE = {
    *("tensor_slices", "tensors", "range", "reader", "map", "filter", "take", "skip", "shard", "options"),
    "pass",
}
# What takes next to no time on an element of less than `_SMALL` bytes.
_QUICK_OPS = {
    *("Const", "Identity", "Placeholder", "NoOp", "Cast", "Reshape", "ExpandDims", "Squeeze", "Shape", "StridedSlice"),
    *("Pack", "OneHot", "Sub", "AddV2", "Mul", "RealDiv", "Maximum", "Minimum", "Neg", "Equal", "Less", "Greater"),
}
_SMALL = 2**20
_SLOW_OPS = ("ReadFile", "Decode", "ParseExample", "ParseSequenceExample", "ParseSingle", "Resize")


@dataclasses.dataclass(frozen=True)
class Step:
    """A stage of the pipeline that is built: one that was there, or a new prefetch (its size) or cache."""

    node: Node | None = None
    changes: Changes = dataclasses.field(default_factory=Changes)
    prefetch: int | None = None

    def on(self, dataset: Any) -> Any:
        if self.node is not None:
            return again(self.node, [dataset], self.changes)
        return dataset.cache() if self.prefetch is None else dataset.prefetch(self.prefetch)


class Tuner:
    """Changes a pipeline step by step. Every method leaves one that gives the same elements."""

    def __init__(self, dataset: Any, budget: int, folder: pathlib.Path | None) -> None:
        # A prediction is a few percent off.
        self.budget, self.folder = int(budget * _AIM), folder
        self.changes: list[str] = []
        self.kept: list[str] = []
        node = chain_of(dataset)
        steps: list[Step] = []
        while len(node.inputs) == 1 and node.kind != "unknown":
            steps.append(Step(node))
            node = node.inputs[0]
        if node.kind == "unknown":
            self.kept.append(f"{node.name} and everything before it: oomproof does not know this stage")
        self.source, self.steps = node, steps[::-1]
        self._leave_what_cannot_be_built()
        if node is self.source and len(node.inputs) > 1 and node.kind != "unknown":
            self._branches(node)
        self.books = Accounts(chain_of(dataset), Elements(), settings_of(chain_of(dataset)))

    def _leave_what_cannot_be_built(self) -> None:
        """Everything up to a stage that cannot be built again stays as it is."""
        for index in reversed(range(len(self.steps))):
            node = self.steps[index].node
            assert node is not None
            try:
                # On something else than its input, or it would be handed back as it is.
                again(node, [node.inputs[0].dataset.prefetch(1)])
            except CannotRebuildError as error:
                self.kept.append(f"{error}; nor what comes before it" if index else str(error))
                self.source, self.steps = node, self.steps[index + 1 :]
                return

    def _branches(self, node: Node) -> None:
        """What comes together in one stage. The budget is that of the whole: what is held in a branch stays there."""
        inputs, changes, kept = [], list[str](), list[str]()
        for number, each in enumerate(node.inputs, 1):
            branch = Tuner(each.dataset, self.budget, None)
            branch.parallel()
            branch.shuffles()
            inputs.append(branch.build())
            changes += [f"branch {number} of {node.name}: {change}" for change in branch.changes]
            kept += [f"branch {number} of {node.name}: {reason}" for reason in branch.kept]
            held = [below.name for below in walk(each) if below.kind in ("cache", "prefetch", "shuffle")]
            if held:
                kept.append(
                    f"branch {number} of {node.name}: the size of {', '.join(held)}, because of the other branches"
                )
        try:
            self.source = chain_of(again(node, inputs))
        except CannotRebuildError as error:
            self.kept.append(f"{error}; nor its branches")
            return
        self.changes += changes
        self.kept += kept

    def build(self) -> Any:
        dataset = self.source.dataset
        for step in self.steps:
            dataset = step.on(dataset)
        return dataset

    def bytes(self, dataset: Any) -> int:
        return audit_tf(dataset, None, False).host_bytes

    def size(self, node: Node) -> int:
        return self.books.size(node)

    def parallel(self) -> None:
        for index, step in enumerate(self.steps):
            node = step.node
            if node is None or node.kind != "map" or node.parallel_calls is not None or node.function is None:
                continue
            if node.function.is_pure and self._is_quick(node):
                continue  # To hand such an element to another thread takes longer.
            if node.function.is_pure:
                self._change(index, parallel_calls=AUTOTUNE)
                self.changes.append(f"{node.name}: parallel calls, in the same order")
            else:
                why = "calls Python" if node.function.calls_python else "draws random numbers or has state"
                self.kept.append(f"{node.name}: it {why}, so parallel calls would change its results")

    def _is_quick(self, node: Node) -> bool:
        assert node.function is not None
        return set(node.function.ops) <= _QUICK_OPS and self.size(node) < _SMALL

    def prefetch(self) -> None:
        """A prefetch at the end, so that the model never waits for a batch that could have been made."""
        last = next((step for step in reversed(self.steps) if step.node is None or step.node.kind != "options"), None)
        node = self.source if last is None else last.node
        if node is not None and node.kind != "prefetch":
            self.steps.append(Step(prefetch=_PREFETCH))
            self.changes.append(f"prefetch({_PREFETCH}) at the end")

    def caches(self) -> None:
        """A cache in memory where it fits, on disk where it does not, none where neither can be."""
        found = [i for i, step in enumerate(self.steps) if step.node and step.node.kind == "cache"]
        for index in reversed(found):
            node = self.steps[index].node
            assert node is not None
            if not node.on_disk:
                self._existing_cache(index, node)
        if not found:
            self._new_cache()

    def _existing_cache(self, index: int, node: Node) -> None:
        count, size = node.inputs[0].cardinality, self.size(node.inputs[0])
        if count < 0:
            self.kept.append(f"{node.name}: the number of its elements is unknown")
            return
        if self.bytes(self.build()) <= self.budget or not count * size:
            return
        held = f"{node.name}: {format_bytes(count * size)} do not fit"
        if self.folder is not None and shutil.disk_usage(self.folder).free > 1.2 * count * size:
            self._change(index, file=str(self.folder / f"oomproof-cache-{uuid.uuid4().hex[:8]}"))
            self.changes.append(f"{held} into memory: on disk, in {self.folder}")
        elif self._repeatable(index):
            del self.steps[index]
            self.changes.append(f"{held}: removed, elements are computed again (cache_dir= keeps them on disk)")
        else:
            self.kept.append(f"{held}, but its elements would differ if computed again: pass cache_dir")

    def _repeatable(self, index: int) -> bool:
        nodes = [self.source, *(step.node for step in self.steps[:index])]
        return all(node is None or _gives_the_same(node) for node in nodes)

    def _new_cache(self) -> None:
        """Behind what is slow and always gives the same, if there is room for all of it."""
        index = 0
        while index < len(self.steps) and _cacheable(self.steps[index].node):
            index += 1
        nodes = [step.node for step in self.steps[:index] if step.node is not None]
        slow = [node for node in nodes if node.function and any(op.startswith(_SLOW_OPS) for op in node.function.ops)]
        if not slow or not _gives_the_same(self.source):
            return
        last = nodes[-1]
        held = last.cardinality * self.size(last)
        if last.cardinality < 0 or held > self.budget * _MOST_FOR_CACHE:
            return
        self.steps.insert(index, Step())
        if self.bytes(self.build()) > self.budget:
            del self.steps[index]
            return
        self.changes.append(f"cache() after {last.name}: {format_bytes(held)}, read and decoded once")

    def shuffles(self) -> None:
        """A shuffle before the maps in front of it: places are shuffled, so the order stays the same."""
        for index in range(1, len(self.steps)):
            node = self.steps[index].node
            if node is None or node.kind != "shuffle":
                continue
            to = index
            while to > 0 and _keeps_places(self.steps[to - 1].node):
                to -= 1
            if to == index:
                continue
            first = self.steps[to].node
            assert first is not None
            here, there = chain_of(self._up_to(index)), chain_of(self._up_to(to))
            saved = (self.size(here) - self.size(there)) * _buffered(node)
            if saved >= _MIB:
                self.steps.insert(to, self.steps.pop(index))
                self.changes.append(f"{node.name} before {first.name}: {format_bytes(saved)} less, in the same order")

    def options(self, dataset: Any) -> Any:
        """Without the copy of the source tensors that TensorFlow's optimising takes; what it would do is done above."""
        import tensorflow as tf

        end = chain_of(dataset)
        settings = settings_of(end)
        sources = Accounts(end, self.books.elements, settings).at(end).sources
        options = tf.data.Options()
        # That optimising is worth a few percent of speed, so only where the copy is what does not fit.
        if settings.rewrites and sources >= _MIB and self.bytes(dataset) > self.budget:
            options.experimental_optimization.apply_default_optimizations = False
            self.changes.append(f"TensorFlow's optimizations off: they copy {format_bytes(sources)} of source tensors")
        if dataset.options().autotune.ram_budget is None:
            # What TensorFlow sizes by itself may grow to what is left.
            options.autotune.ram_budget = max(_MIB, self.budget - sources)
        return dataset.with_options(options)

    def bound(self) -> None:
        """Smaller buffers where it still does not fit: prefetches first, since they change nothing."""
        for kind in ("prefetch", "shuffle"):
            for index, step in enumerate(self.steps):
                if step.node is None and kind == "prefetch" and (step.prefetch or 0) > 1 and self._over() > 0:
                    self.steps[index] = Step(prefetch=1)
                if step.node is not None and step.node.kind == kind:
                    self._bound_buffer(index, step.node)

    def _over(self) -> int:
        return self.bytes(self.options_quietly(self.build())) - self.budget

    def _bound_buffer(self, index: int, node: Node) -> None:
        asked, size = node.number("_buffer_size"), self.size(chain_of(self._up_to(index)))
        least = 1 if node.kind == "prefetch" else min(asked, 2 * _batch_size(self.steps))
        step, buffered = self.steps[index], asked
        # A few times: a buffer that no longer holds the whole dataset does not run empty at the end of an epoch.
        for _ in range(4):
            if (over := self._over()) <= 0 or buffered == least:
                break
            buffered = least if asked == AUTOTUNE else max(least, buffered - -(-over // max(1, size)))
            self._change(index, size=buffered)
        if buffered == asked:
            return
        if node.kind == "shuffle" and self._over() > 0:
            # Another order is a price to pay for fitting, and not for fitting a little less badly.
            self.steps[index] = step
            return
        order = "; the order changes" if node.kind == "shuffle" else ""
        self.changes.append(f"{node.name}: buffer of {buffered} to stay within the budget{order}")

    def options_quietly(self, dataset: Any) -> Any:
        told = list(self.changes)
        try:
            return self.options(dataset)
        finally:
            self.changes = told

    def _up_to(self, index: int) -> Any:
        dataset = self.source.dataset
        for step in self.steps[:index]:
            dataset = step.on(dataset)
        return dataset

    def _change(self, index: int, **what: Any) -> None:
        step = self.steps[index]
        self.steps[index] = dataclasses.replace(step, changes=dataclasses.replace(step.changes, **what))


def tuned(dataset: Any, budget: int, folder: pathlib.Path | None) -> tuple[Any, Tuning]:
    """The pipeline within the budget, and what was done to it."""
    before = audit_tf(dataset, None, False)
    tuner = Tuner(dataset, budget, folder)
    tuner.parallel()
    tuner.prefetch()
    tuner.caches()
    tuner.shuffles()
    tuner.bound()
    result = tuner.options(tuner.build())
    after = audit_tf(result, None, False)
    if after.host_bytes > budget:
        largest = max(after.stages, key=lambda stage: stage.bytes or 0)
        tuner.kept.append(f"{largest.name}: {format_bytes(largest.bytes or 0)} that cannot be reduced")
    tuning = Tuning(budget, before, after, tuple(tuner.changes), tuple(tuner.kept))
    result.tuning = tuning
    return result, tuning


def _gives_the_same(node: Node) -> bool:
    if node.kind not in _REPEATABLE or (node.function is not None and not node.function.is_pure):
        return False
    return all(_gives_the_same(each) for each in node.inputs)


def _cacheable(node: Node | None) -> bool:
    return _keeps_places(node) or (node is not None and node.kind == "filter" and _gives_the_same(node))


def _keeps_places(node: Node | None) -> bool:
    return node is not None and node.kind == "map" and bool(node.function and node.function.is_pure)


def _buffered(node: Node) -> int:
    size, count = node.number("_buffer_size"), node.inputs[0].cardinality
    return min(size, count) if count >= 0 else size


def _batch_size(steps: list[Step]) -> int:
    sizes = [step.node.number("_batch_size") for step in steps if step.node and "batch" in step.node.kind]
    return max(sizes, default=1)
