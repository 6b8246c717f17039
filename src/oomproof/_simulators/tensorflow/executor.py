"""Runs a graph the way TensorFlow's executor does, with sizes in the place of tensors.

A node runs when its inputs are there, a tensor is freed when the last node that needs it has run, and loops run as
often as they would: their counters are the only numbers that are computed.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence
from typing import Any

from oomproof._simulators.tensorflow.convolutions import CONVOLUTIONS
from oomproof._simulators.tensorflow.graph import Node, StepGraph, TensorType
from oomproof._simulators.tensorflow.kernels import Kernel, kernel_of, ops
from oomproof._simulators.tensorflow.values import COMPUTED, DEAD, Block, Items, Value, shape_at_run_time

_LONGEST_LOOP = 100_000
_OPEN_LOOP = "A loop whose end depends on data is not counted: how often it runs is only known when it does."
# Kernels of a CPU that TensorFlow runs at once rather than hand them to another thread.
_CHEAP = ops("""
    Const Identity IdentityN NoOp Reshape ExpandDims Squeeze StopGradient Shape ShapeN Rank Size Switch Merge
    Enter Exit NextIteration LoopCond VarHandleOp ReadVariableOp VariableShape AnonymousIterator
""")


class Frame:
    """A loop that runs, or the graph around all loops."""

    def __init__(self, parent: Frame | None, parent_round: int) -> None:
        self.parent, self.parent_round = parent, parent_round
        self.rounds: list[dict[int, Arrivals]] = []
        self.constants: list[tuple[int, Value]] = []
        self.children: dict[tuple[int, str], Frame] = {}


class Arrivals:
    """What has arrived at a node of the inputs it waits for."""

    __slots__ = ("dead", "missing", "values")

    def __init__(self, values: int, missing: int) -> None:
        self.values: list[Any] = [None] * values
        self.missing = missing
        self.dead = 0


_Task = tuple[int, Frame, int, Arrivals]


class _Queue:
    """The order nodes run in once they can.

    On a GPU to start a kernel is cheap, and one thread starts them as they become ready. On a CPU it hands all but the
    last of those that became ready to its pool of threads, which begins with what came last.
    """

    def __init__(self, nodes: Sequence[Node], gpu: bool) -> None:
        self._cheap = [gpu or node.op in _CHEAP for node in nodes]
        self._inline: collections.deque[_Task] = collections.deque()
        self._pool: collections.deque[_Task] = collections.deque()

    def begin(self, roots: Sequence[_Task]) -> None:
        self._pool.extend(roots)

    def add(self, ready: Sequence[_Task]) -> None:
        costly = None
        for task in ready:
            if self._cheap[task[0]]:
                self._inline.append(task)
            else:
                if costly is not None:
                    self._pool.appendleft(costly)
                costly = task
        if costly is not None:
            if self._inline:
                self._pool.appendleft(costly)
            else:
                self._inline.append(costly)

    def next(self) -> _Task | None:
        if self._inline:
            return self._inline.popleft()
        return self._pool.popleft() if self._pool else None


@dataclasses.dataclass(slots=True)
class Execution:
    """What came of a run: the nodes that allocated something, in order, and every allocation."""

    ran: list[Node]
    blocks: list[Block]
    notes: list[str]


class Executor:
    """Runs a graph once.

    Args:
        graph: The graph.
        gpu: Whether kernels are those of a GPU.
    """

    def __init__(self, graph: StepGraph, gpu: bool) -> None:
        self._gpu = gpu
        self._nodes = graph.nodes
        self._results = graph.results
        self._index = {id(node): number for number, node in enumerate(graph.nodes)}
        self._consumers: list[list[tuple[int, int]]] = [[] for _ in graph.nodes]
        self._ports: list[list[int]] = [[] for _ in graph.nodes]
        for number, node in enumerate(graph.nodes):
            for slot, (source, port) in enumerate(node.inputs):
                self._consumers[self._index[id(source)]].append((number, slot))
                self._ports[self._index[id(source)]].append(port)
            for source in node.controls:
                self._consumers[self._index[id(source)]].append((number, -1))
                self._ports[self._index[id(source)]].append(-1)
        self._queue = _Queue(graph.nodes, gpu)
        self._ran: list[Node] = []
        self._blocks: list[Block] = []
        self._notes: list[str] = []
        self._variables: dict[str, Block] = {}
        for variable in graph.variables:
            block = self._block(variable.size, None, -1)
            block.variable = variable
            if variable.node:
                self._variables[variable.node] = block
        # TensorFlow makes one tensor for all slots of a shape, since all begin as the same number.
        self._alike = collections.Counter(v.shape for v in graph.variables if v.category == "optimizer" and v.node)

    def run(self) -> Execution:
        main = Frame(None, 0)
        main.rounds.append({})
        roots = [number for number, node in enumerate(self._nodes) if not node.inputs and not node.controls]
        self._queue.begin([(number, main, 0, Arrivals(0, 0)) for number in roots])
        while (task := self._queue.next()) is not None:
            number, frame, at, arrived = task
            node = self._nodes[number]
            dead = arrived.dead > 0 if node.op != "Merge" else arrived.values[0] is None
            outputs = [DEAD] * max(len(node.outputs), 1) if dead else self._compute(node, arrived.values)
            held = [value for value in outputs if isinstance(value, Value)]
            for value in held:
                # A result that is an input must not be freed in between.
                self._use(value)
            for value in arrived.values:
                if isinstance(value, Value):
                    if isinstance(value.held, Block):
                        value.held.last_user = node
                    self._release(value)
            self._send(number, frame, at, outputs, dead)
            # What the step returns is kept.
            if node.name not in self._results:
                self._drop(held)
        return Execution(self._ran, self._blocks, self._notes)

    # Memory

    def _block(self, size: int, node: Node | None, start: int) -> Block:
        block = Block(size, node, start)
        self._blocks.append(block)
        return block

    def _release(self, value: Value) -> None:
        held = value.held
        if held is None:
            return
        held.users -= 1
        if held.users:
            return
        if isinstance(held, Items):
            for item in held.items:
                if item is not None:
                    self._release(item)
        else:
            held.end = len(self._ran) - 1

    # Messages

    def _send(self, number: int, frame: Frame, at: int, outputs: Sequence[Any], dead: bool) -> None:
        node = self._nodes[number]
        where, when = frame, at
        if node.op == "Enter":
            name = node.attributes["frame_name"].s.decode()
            where, when = frame.children.setdefault((at, name), Frame(frame, at)), 0
            if not where.rounds:
                where.rounds.append({})
            if node.attributes["is_constant"].b:
                where.constants.append((number, outputs[0]))
                if outputs[0] is not DEAD and outputs[0].held is not None:
                    outputs[0].held.users += 1
                for when in range(len(where.rounds)):
                    self._deliver(number, where, when, outputs, dead)
                return
        elif node.op == "NextIteration":
            when = at + 1
            if dead or when > _LONGEST_LOOP:
                return
            if when == len(frame.rounds):
                frame.rounds.append({})
                for constant, value in frame.constants:
                    self._deliver(constant, frame, when, [value], value is DEAD)
        elif node.op == "Exit":
            if dead or frame.parent is None:
                return
            for _, value in frame.constants:
                if value is not DEAD:
                    self._release(value)
            frame.constants = []
            where, when = frame.parent, frame.parent_round
        self._deliver(number, where, when, outputs, dead)

    def _drop(self, held: Sequence[Value]) -> None:
        for value in held:
            self._release(value)

    def _deliver(self, number: int, frame: Frame, at: int, outputs: Sequence[Any], dead: bool) -> None:
        ready: list[_Task] = []
        arrivals = frame.rounds[at]
        for (consumer, slot), port in zip(self._consumers[number], self._ports[number], strict=True):
            node = self._nodes[consumer]
            merge = node.op == "Merge"
            arrived = arrivals.get(consumer)
            if arrived is None:
                missing = len(node.controls) + (1 if merge else len(node.inputs))
                arrived = arrivals[consumer] = Arrivals(1 if merge else len(node.inputs), missing)
            value: Any = outputs[port] if port >= 0 else (DEAD if dead else None)
            if merge and slot >= 0:
                if value is DEAD:
                    arrived.dead += 1
                    arrived.missing -= arrived.dead == len(node.inputs)
                elif arrived.values[0] is None:
                    arrived.values[0] = value
                    self._use(value)
                    arrived.missing -= 1
                else:
                    continue
            else:
                arrived.missing -= 1
                if value is DEAD:
                    arrived.dead += 1
                elif slot >= 0:
                    arrived.values[slot] = value
                    self._use(value)
            if arrived.missing == 0:
                arrived.missing = -1
                del arrivals[consumer]
                ready.append((consumer, frame, at, arrived))
        self._queue.add(ready)

    def _use(self, value: Value) -> None:
        if value.held is not None:
            value.held.users += 1

    # Kernels

    def _compute(self, node: Node, inputs: Sequence[Value]) -> Sequence[Any]:
        special = getattr(self, f"_run_{node.op.lower()}", None)
        if special is not None:
            result: Sequence[Any] = special(node, inputs)
            return result
        types = [self._type(node, kind, inputs) for kind in node.outputs]
        kernel = kernel_of(node, [value.type for value in inputs], types, self._gpu)
        computed = COMPUTED.get(node.op)
        number = node.value
        if computed is not None and all(value.number is not None for value in inputs):
            number = computed(*(value.number for value in inputs))
        if kernel.same:
            return [Value(kind, v.held, v.number, v.variable) for kind, v in zip(types, inputs, strict=False)]
        if kernel.host:
            return [Value(kind, None, number) for kind in types]
        scratch = list(kernel.scratch)
        if kernel.overwrites is not None:
            held = inputs[kernel.overwrites].held
            if held is not None and held.users > 1:
                scratch.append(inputs[kernel.overwrites].type.size)
        # Convolutions have their results allocated first; what others work in comes before those.
        before = [] if node.op in CONVOLUTIONS else [self._scratch(size, node, kernel) for size in scratch]
        made = [self._result(kind, inputs if kernel.in_place else ()) for kind in types]
        allocations = [value for value in made if value.held is not None and value.held.start == len(self._ran)]
        if node.op == "Const":
            for value in made:
                if isinstance(value.held, Block):
                    value.held.start, value.held.node, value.held.users = -1, node, 1
        elif allocations or scratch:
            for value in allocations:
                if isinstance(value.held, Block):
                    value.held.node = node
            for size in scratch[len(before) :]:
                self._scratch(size, node, kernel)
            self._ran.append(node)
        made[0].number = number
        return made

    def _scratch(self, size: int, node: Node, kernel: Kernel) -> Block:
        block = self._block(size, node, len(self._ran))
        block.end, block.fixed = len(self._ran), kernel.fixed
        return block

    def _result(self, kind: TensorType, reusable: Sequence[Value]) -> Value:
        size = kind.size
        for value in reusable:
            held = value.held
            if (
                isinstance(held, Block)
                and held.users == 1
                and value.type.size == size
                and value.type.dtype == kind.dtype
            ):
                return Value(kind, held)
        return Value(kind, self._block(size, None, len(self._ran)) if size else None)

    def _type(self, node: Node, kind: TensorType, inputs: Sequence[Value]) -> TensorType:
        if kind.known or kind.dtype in ("variant", "resource"):
            return kind
        return TensorType(shape_at_run_time(node.op, kind.shape, [value.type.shape for value in inputs]), kind.dtype)

    def _new(self, node: Node, kind: TensorType) -> Value:
        block = self._block(kind.size, node, len(self._ran))
        self._ran.append(node)
        return Value(kind, block)

    # Control flow

    def _run_switch(self, node: Node, inputs: Sequence[Value]) -> Sequence[Any]:
        data, predicate = inputs
        # What is decided by data is taken to go the way that does more: an update that is made rather than skipped.
        taken = True if predicate.number is None else bool(predicate.number)
        value = Value(data.type, data.held, data.number)
        return [DEAD, value] if taken else [value, DEAD]

    def _run_merge(self, node: Node, inputs: Sequence[Value]) -> Sequence[Any]:
        value = inputs[0]
        return [Value(value.type, value.held, value.number), Value(TensorType((), "int32"), None)]

    def _run_loopcond(self, node: Node, inputs: Sequence[Value]) -> Sequence[Any]:
        going_on = inputs[0].number
        if going_on is None and _OPEN_LOOP not in self._notes:
            self._notes.append(_OPEN_LOOP)
        return [Value(inputs[0].type, None, going_on or False)]

    def _run_noop(self, node: Node, inputs: Sequence[Value]) -> Sequence[Any]:
        return []

    # Variables

    def _run_varhandleop(self, node: Node, inputs: Sequence[Value]) -> Sequence[Any]:
        return [Value(node.outputs[0], None, None, node.name)]

    def _run_readvariableop(self, node: Node, inputs: Sequence[Value]) -> Sequence[Any]:
        return [Value(node.outputs[0], self._variables.get(inputs[0].variable or ""))]

    def _run_assignvariableop(self, node: Node, inputs: Sequence[Value]) -> Sequence[Any]:
        name, value = inputs[0].variable, inputs[1]
        if name is None or name not in self._variables:
            return []
        current = self._variables[name]
        if isinstance(value.held, Block) and value.held.users == 1:
            self._replace(name, current, value.held)
        elif current.users > 1:
            self._copied(node, name, current)
        return []

    def _run_update(self, node: Node, inputs: Sequence[Value]) -> Sequence[Any]:
        """Written in place, or to a copy while somebody still reads the old value."""
        name = inputs[0].variable
        if name is None or name not in self._variables:
            return []
        current = self._variables[name]
        if current.users > 1:
            self._copied(node, name, current)
        elif current.first < 0 and self._shares_its_place(current):
            # In the very first step it gets one of its own here.
            current.first = len(self._ran)
            self._ran.append(node)
        return []

    def _shares_its_place(self, slot: Block) -> bool:
        """Whether others begin in the same place. The last one keeps it."""
        if slot.variable is None or slot.variable.category != "optimizer":
            return False
        self._alike[slot.variable.shape] -= 1
        return self._alike[slot.variable.shape] > 0

    _run_assignaddvariableop = _run_assignsubvariableop = _run_update
    _run_resourcescatteradd = _run_resourcescattersub = _run_resourcescatterupdate = _run_update

    def _copied(self, node: Node, name: str, current: Block) -> None:
        block = self._block(current.size, node, len(self._ran))
        self._ran.append(node)
        self._replace(name, current, block)

    def _replace(self, name: str, current: Block, block: Block) -> None:
        block.users += 1
        block.variable = current.variable
        self._variables[name] = block
        self._release(Value(TensorType((), "resource"), current))

    # Lists of tensors, by which loops keep what their backward pass needs

    def _run_emptytensorlist(self, node: Node, inputs: Sequence[Value]) -> Sequence[Any]:
        return [Value(node.outputs[0], Items([]))]

    def _run_tensorlistreserve(self, node: Node, inputs: Sequence[Value]) -> Sequence[Any]:
        length = 0 if inputs[1].number is None else int(inputs[1].number)
        return [Value(node.outputs[0], Items([None] * length))]

    def _run_tensorlistfromtensor(self, node: Node, inputs: Sequence[Value]) -> Sequence[Any]:
        shape = inputs[0].type.shape or (0,)
        kind = TensorType(shape[1:], inputs[0].type.dtype)
        items: list[Value | None] = [Value(kind, self._block(kind.size, node, len(self._ran))) for _ in range(shape[0])]
        self._ran.append(node)
        return [Value(node.outputs[0], self._holding(items))]

    def _run_tensorlistpushback(self, node: Node, inputs: Sequence[Value]) -> Sequence[Any]:
        items = self._own(inputs[0])
        items.items.append(inputs[1])
        self._use(inputs[1])
        return [Value(node.outputs[0], items)]

    def _run_tensorlistpopback(self, node: Node, inputs: Sequence[Value]) -> Sequence[Any]:
        items = self._own(inputs[0])
        last = items.items.pop() if items.items else None
        if last is None:
            return [Value(node.outputs[0], items), self._new(node, node.outputs[1])]
        popped = Value(last.type, last.held, last.number)
        if last.held is not None:
            # The list's use of it ends once the result has its own.
            last.held.users -= 1
        return [Value(node.outputs[0], items), popped]

    def _run_tensorlistsetitem(self, node: Node, inputs: Sequence[Value]) -> Sequence[Any]:
        items, at = self._own(inputs[0]), inputs[1].number
        place = None if at is None else int(at)
        if place is None or place >= len(items.items):
            place = len(items.items)
            items.items.append(None)
        old = items.items[place]
        if old is not None:
            self._release(old)
        items.items[place] = inputs[2]
        self._use(inputs[2])
        return [Value(node.outputs[0], items)]

    def _run_tensorlistgetitem(self, node: Node, inputs: Sequence[Value]) -> Sequence[Any]:
        held, at = inputs[0].held, inputs[1].number
        items = held.items if isinstance(held, Items) else []
        found = items[int(at)] if at is not None and int(at) < len(items) else None
        if found is None:
            kind = node.outputs[0]
            known = next((item.type for item in items if item is not None), kind)
            return [self._new(node, kind if kind.known else known)]
        return [Value(found.type, found.held, found.number)]

    def _run_tensorliststack(self, node: Node, inputs: Sequence[Value]) -> Sequence[Any]:
        held, kind = inputs[0].held, node.outputs[0]
        items = [item for item in held.items if item is not None] if isinstance(held, Items) else []
        if items and not kind.known and isinstance(held, Items):
            kind = TensorType((len(held.items), *(items[0].type.shape or ())), kind.dtype)
        return [self._new(node, kind)]

    def _run_tensorlistlength(self, node: Node, inputs: Sequence[Value]) -> Sequence[Any]:
        held = inputs[0].held
        return [Value(node.outputs[0], None, len(held.items) if isinstance(held, Items) else None)]

    def _own(self, value: Value) -> Items:
        held = value.held
        if not isinstance(held, Items):
            return Items([])
        return held if held.users == 1 else self._holding(held.items)

    def _holding(self, items: Sequence[Value | None]) -> Items:
        for item in items:
            if item is not None:
                self._use(item)
        return Items(list(items))
