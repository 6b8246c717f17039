"""A model and its traced step as the chain of segments that planning works on.

The segments come from the model's graph: its calls in the order Keras makes them, cut where little crosses. What they
keep comes from the trace of the plain step, by the layer that each allocation belongs to.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import numpy as np
from keras import tree

from oomproof._backends.base import Backend
from oomproof._backends.common.call_graph import Call, graph_of, graphs
from oomproof._backends.common.head import gains, heads
from oomproof._compat.keras import Reshape
from oomproof._planning.costs import cost_of, flops, spec_of
from oomproof._records.trace import Buffer, Chain, Op, Segment, Spec, Trace, Workload
from oomproof._records.units import tensor_bytes

# More segments than this are merged: plans get no better, and finding them takes longer.
MOST_SEGMENTS = 64


def chain_of(model: Any, workload: Workload, trace: Trace, peak: int, backend: Backend) -> Chain:
    """What planning needs to know about a step.

    Args:
        model: A built model. One with code of its own has no segments: it cannot be recomputed in parts.
        workload: The plain step.
        trace: Its trace.
        peak: Its peak, as estimated.
        backend: The framework that traced it.
    """
    batch_size = next(leaf.shape[0] for leaf in tree.flatten(workload.x) if leaf is not None)
    calls = Calls(model, workload, batch_size)
    groups = calls.groups()
    # A guarded step updates when all gradients are there. Keras's own graph, which is traced, begins before.
    after_all = workload.guarded and not workload.jit and backend.traits.update_waits
    account = _Account(trace, [[calls.path(index) for index in group] for group in groups], after_all)
    costs = [sum(calls.cost(index) for index in group) for group in groups]
    gradients = calls.gradients(groups)
    crossing = calls.crossing(groups)
    segments = tuple(
        Segment(
            first=calls.label(group[0]),
            last=calls.label(group[-1]),
            kept=account.kept[number],
            crossing=crossing[number],
            work=account.work(number, crossing[number][0]),
            gradients=gradients[number],
            cost=costs[number] / (sum(costs) or 1.0),
        )
        for number, group in enumerate(groups)
    )
    return Chain(
        batch_size=batch_size,
        segments=segments,
        resident=account.resident,
        inputs=account.inputs,
        outside=account.outside,
        update=account.update,
        peak=peak + account.at_once,
        seconds=sum(costs),
        calls=sum(calls.layers(index) for group in groups for index in group),
        scratch=account.scratch,
        rows=calls.rows() if backend.traits.sparse_gradients else 0,
        heads=_heads(model, segments),
    )


def _heads(model: Any, segments: Sequence[Segment]) -> tuple[int, ...]:
    if not gains(model):
        return ()
    first = set(heads(model))
    return tuple(number for number, segment in enumerate(segments) if number and segment.first in first)


# The model


@dataclasses.dataclass(frozen=True)
class _Made:
    """A call in its place: what it reads and makes, by tensors that are the same inside and outside of inner models."""

    call: Call
    graph: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


class Calls:
    """All calls of a model, those of inner models in the place of the calls of these.

    An inner model that is called more than once stays one call each time: its own calls have one label for all times.
    """

    def __init__(self, model: Any, workload: Workload, batch_size: int) -> None:
        self._batch_size = batch_size
        self._same: dict[int, int] = {}
        self._graphs = {graph.prefix: graph for graph in graphs(model)}
        self._made = list(self._flattened("")) if self._graphs else []
        self._specs: dict[int, Spec] = {}
        # Of each tensor, the last call that reads it; what the model returns is needed beyond all of them.
        self._last: dict[int, int] = {}
        if not self._made:
            return
        for index, made in enumerate(self._made):
            self._last.update((tensor, index) for tensor in made.inputs)
        function = self._graphs[""].function
        self._last.update((self._key(tensor), len(self._made)) for tensor in tree.flatten(function._outputs_struct))
        self._specs = _specs(self._made, function, self._key, workload, batch_size)

    def _flattened(self, prefix: str) -> Iterator[_Made]:
        times = collections.Counter(id(call.operation) for call in self._graphs[prefix].calls)
        for call in self._graphs[prefix].calls:
            inner = f"{call.path}/"
            if times[id(call.operation)] == 1 and self._opens(call, inner):
                function = self._graphs[inner].function
                given = tree.flatten(function._inputs_struct)
                self._same.update(zip(map(id, given), map(self._key, call.node.input_tensors), strict=True))
                yield from self._flattened(inner)
                returned = tree.flatten(function._outputs_struct)
                self._same.update(zip(call.outputs, map(self._key, returned), strict=True))
            else:
                inputs = dict.fromkeys(self._same.get(tensor, tensor) for tensor in call.inputs)
                yield _Made(call, self._graphs[prefix].names, tuple(inputs), call.outputs)

    def _opens(self, call: Call, inner: str) -> bool:
        graph = self._graphs.get(inner)
        if graph is None or graph.function is not graph_of(call.operation):
            return False
        function: Any = graph.function
        taken, returned = tree.flatten(function._inputs_struct), tree.flatten(function._outputs_struct)
        return len(taken) == len(call.inputs) and len(returned) == len(call.outputs)

    def _key(self, tensor: Any) -> int:
        return self._same.get(id(tensor), id(tensor))

    # A call

    def label(self, index: int) -> str:
        return self._made[index].call.label

    def path(self, index: int) -> str:
        """Of its layer, as traces have it."""
        made = self._made[index]
        return f"{made.graph}{made.call.operation.name}"

    def cost(self, index: int) -> float:
        return cost_of(self._made[index].call.operation, *self._shapes(index))

    def layers(self, index: int) -> int:
        """How many layers it calls, itself included."""
        operation = self._made[index].call.operation
        inner = operation._flatten_layers(include_self=False) if isinstance(operation, keras.Layer) else ()
        return 1 + len(list(inner))

    def _shapes(self, index: int) -> tuple[list[Spec], list[Spec]]:
        made = self._made[index]
        return [self._specs[tensor] for tensor in made.inputs], [self._specs[tensor] for tensor in made.outputs]

    def _size(self, tensor: int) -> int:
        return tensor_bytes(self._specs[tensor].shape, self._specs[tensor].dtype)

    # Segments

    def groups(self) -> list[list[int]]:
        """Calls that follow each other in one graph, cut where little crosses."""
        groups: list[list[int]] = []
        for index, made in enumerate(self._made):
            if groups and made.graph == self._made[groups[-1][0]].graph and self._is_cheap(index):
                groups[-1].append(index)
            else:
                groups.append([index])
        if len(groups) <= MOST_SEGMENTS:
            return groups
        crossing = self._crossing_after()
        sizes = [sum(self._size(tensor) for index in group for tensor in self._made[index].outputs) for group in groups]
        while len(groups) > MOST_SEGMENTS:
            # Two that make little go together, all the sooner the more crosses between them.
            scores = [
                (a + b) / max(1, crossing[left[-1]])
                if self._made[left[0]].graph == self._made[right[0]].graph
                else float("inf")
                for (left, right), (a, b) in zip(itertools.pairwise(groups), itertools.pairwise(sizes), strict=True)
            ]
            at = int(np.argmin(scores))
            if scores[at] == float("inf"):
                break
            groups[at : at + 2] = [groups[at] + groups[at + 1]]
            sizes[at : at + 2] = [sizes[at] + sizes[at + 1]]
        return groups

    def _is_cheap(self, index: int) -> bool:
        """Whether it only passes over what the call before has made: an activation, padding, a sum."""
        operation = self._made[index].call.operation
        return not getattr(operation, "weights", ()) and flops(operation, *self._shapes(index)) == 0

    def _crossing_after(self) -> list[int]:
        """Bytes that cross from each call to the next."""
        change = [0] * (len(self._made) + 1)
        for index, made in enumerate(self._made):
            for tensor in made.outputs:
                change[index] += self._size(tensor)
                change[self._last.get(tensor, index)] -= self._size(tensor)
        return list(itertools.accumulate(change))[:-1]

    def crossing(self, groups: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
        """Of each segment, what is still needed after its end, and after the end of each that follows."""
        found = []
        for number, group in enumerate(groups):
            made = [(self._last.get(t, -1), self._size(t)) for index in group for t in self._made[index].outputs]
            ends = [later[-1] for later in groups[number:]]
            found.append(tuple(sum(size for last, size in made if last > end) for end in ends))
        return found

    def gradients(self, groups: Sequence[Sequence[int]]) -> list[int]:
        """Bytes of the gradients of weights. Shared ones are the last segment's, whose backward pass comes first."""
        seen: set[int] = set()
        found = [0] * len(groups)
        for number in reversed(range(len(groups))):
            for index in groups[number]:
                for weight in getattr(self._made[index].call.operation, "trainable_weights", ()):
                    if id(weight) not in seen:
                        seen.add(id(weight))
                        found[number] += tensor_bytes(tuple(weight.shape), weight.dtype)
        return found

    def rows(self) -> int:
        """Bytes of the gradients of embeddings where these are the rows that were looked up, not whole tables."""
        looked_up = [made for made in self._made if isinstance(made.call.operation, keras.layers.Embedding)]
        return sum(self._size(t) for made in looked_up if made.call.operation.trainable for t in made.outputs)


def _specs(made: Sequence[_Made], function: Any, key: Any, workload: Workload, batch_size: int) -> dict[int, Spec]:
    """Shape and dtype of every tensor of the graph, in this step."""
    given = tree.flatten(function._inputs_struct)
    specs = {key(tensor): spec_of(tensor, batch_size) for tensor in given}
    leaves = [leaf for leaf in tree.flatten(workload.x) if leaf is not None]
    if len(leaves) == len(given):
        specs.update((key(tensor), leaf) for tensor, leaf in zip(given, leaves, strict=True))
    settled = not any(_is_open(one.call) for one in made)
    for one in made:
        tensors = one.call.node.outputs if settled else _called(one.call, key, specs)
        for place, tensor in zip(one.outputs, tensors, strict=True):
            spec = spec_of(tensor, batch_size)
            specs[place] = dataclasses.replace(spec, dtype=_dtype(one, spec, specs))
    return specs


def _is_open(call: Call) -> bool:
    """Whether the batch size alone does not say how large its results are."""
    return isinstance(call.operation, Reshape) or any(None in tensor.shape[1:] for tensor in call.node.outputs)


def _called(call: Call, key: Any, specs: dict[int, Spec]) -> list[Any]:
    """What a call makes of tensors of these shapes."""
    given = {id(tensor): specs[key(tensor)] for tensor in call.node.input_tensors}
    symbolic = {place: keras.KerasTensor(spec.shape, spec.dtype) for place, spec in given.items()}
    args, kwargs = call.node.arguments.fill_in(symbolic)
    return list(tree.flatten(call.operation.compute_output_spec(*args, **kwargs)))


def _dtype(made: _Made, spec: Spec, specs: dict[int, Spec]) -> str:
    """The dtype of a result. The policy may have changed since the graph was made, so the record is not asked."""
    if "float" not in spec.dtype:
        return spec.dtype
    if isinstance(made.call.operation, keras.layers.Layer):
        return str(made.call.operation.compute_dtype)
    floats = [specs[tensor].dtype for tensor in made.inputs if "float" in specs[tensor].dtype]
    return floats[0] if floats else spec.dtype


# The trace


class _Account:
    """Whose the allocations of a step are.

    Args:
        trace: The step.
        paths: Of each segment, the paths of the layers it calls.
        after_all: Whether the update begins when the backward pass is over, whatever the trace says.
    """

    def __init__(self, trace: Trace, paths: Sequence[Sequence[str]], after_all: bool) -> None:
        self._count = max(1, len(trace.ops))
        self._callers: dict[str, list[int]] = {}
        for number, segment in enumerate(paths):
            for path in segment:
                self._callers.setdefault(path, []).append(number)
        self._known: dict[str, list[int]] = {}
        moving = [b for b in trace.buffers if b.start >= 0]
        activations = [b for b in trace.buffers if b.category == "activations"]
        inputs = self._timeline([b for b in trace.buffers if b.category == "input"])
        between = [b for b in moving if b.category not in ("activations", "gradients", "input")]
        temporary = self._timeline([b for b in between if not b.fixed])
        # The two gradients of a convolution wait for the same, so that on a CPU they run at once. Traces have them one
        # after the other.
        fixed = sorted((b.size for b in between if b.fixed), reverse=True)
        self.scratch, self.at_once = sum(fixed[:2]), sum(fixed[1:2])
        lasting = [b for b in trace.buffers if b.start < 0]
        self.resident = sum(b.size for b in lasting if b.category not in ("activations", "gradients", "input"))
        self.inputs = int(inputs.max())
        updating = [b for b in between if trace.ops[b.start].stage == "update"]
        self.update = (
            int(self._timeline(updating).max())
            if after_all
            else self._update(trace.ops, temporary + self._timeline(activations))
        )
        self.kept, self.outside = self._kept(trace.ops, activations, len(paths))
        self._work: dict[int, int] = {}
        for index, op in enumerate(trace.ops):
            for number in self._of(op.layer) if op.stage == "backward" else ():
                self._work[number] = max(self._work.get(number, 0), int(temporary[index]))

    def work(self, number: int, result: int) -> int:
        """Where its backward pass is part of another's kernels, the gradient of its result has to do."""
        passes = any(other <= number for other in self._work)
        return self._work.get(number, result if passes else 0)

    def _of(self, path: str) -> list[int]:
        """The segments of the calls of the outermost layer that is called in the graph, once for each call."""
        if path not in self._known:
            parts = path.split("/")
            outer = ("/".join(parts[:length]) for length in range(len(parts), 0, -1))
            self._known[path] = next((self._callers[one] for one in outer if one in self._callers), [])
        return self._known[path]

    def _timeline(self, buffers: Sequence[Buffer]) -> Any:
        """Bytes alive during each op."""
        change = np.zeros(self._count + 1, dtype=np.int64)
        for buffer in buffers:
            change[max(0, buffer.start)] += buffer.size
            change[min(buffer.end, self._count - 1) + 1] -= buffer.size
        return np.cumsum(change[:-1])

    def _kept(self, ops: Sequence[Op], activations: Sequence[Buffer], segments: int) -> tuple[list[int], int]:
        """What each segment keeps, and what nobody does, when the forward pass is over: when most is kept."""
        turn = int(np.argmax(self._timeline(activations)))
        kept, outside = [0] * segments, 0
        before = self._before(ops)
        for buffer in activations:
            if not buffer.start <= turn <= buffer.end:
                continue
            owners = self._of(buffer.layer) or before[max(0, buffer.start)]
            for place, owner in enumerate(owners):
                kept[owner] += buffer.size * (place + 1) // len(owners) - buffer.size * place // len(owners)
            outside += 0 if owners else buffer.size
        return kept, outside

    def _before(self, ops: Sequence[Op]) -> list[list[int]]:
        """For each op, whose it is if it names no layer: an operation's, which comes after a layer, or the loss's."""
        found: list[list[int]] = []
        current: list[int] = []
        for op in ops:
            current = (self._of(op.layer) if op.stage == "forward" else []) or current
            found.append(current)
        last = max((i for i, op in enumerate(ops) if op.stage == "forward" and self._of(op.layer)), default=-1)
        return [owners if index < last else [] for index, owners in enumerate(found)]

    def _update(self, ops: Sequence[Op], use: Any) -> int:
        """A compiled step updates what it can while the backward pass runs, which then counts there."""
        done = max((index for index, op in enumerate(ops) if op.stage == "backward"), default=-1)
        late = [int(use[index]) for index, op in enumerate(ops) if op.stage == "update" and index > done]
        return max(late, default=0)
