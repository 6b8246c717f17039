"""In which order the nodes of a graph run: each once what it waits for is there, in a loop once for each round."""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import Any, NamedTuple

from oomproof._simulators.tensorflow.graph import Node
from oomproof._simulators.tensorflow.kernels import ops
from oomproof._simulators.tensorflow.memory import Memory
from oomproof._simulators.tensorflow.values import DEAD

_LONGEST_LOOP = 100_000
# Kernels of a CPU that TensorFlow runs at once rather than hand them to another thread.
_CHEAP = ops("""
    Const Identity IdentityN NoOp Reshape ExpandDims Squeeze StopGradient Shape ShapeN Rank Size Switch Merge
    Enter Exit NextIteration LoopCond VarHandleOp ReadVariableOp VariableShape AnonymousIterator
""")


class Frame:
    """A loop that runs, or the graph around all loops.

    Attributes:
        parent: The loop or graph around it.
        parent_round: The round of that one in which this loop began.
        rounds: For each round, what has arrived at nodes that still wait.
        constants: What every round is given, by the number of the node that gives it.
        children: The loops within, by the round they began in and their name.
    """

    def __init__(self, parent: Frame | None, parent_round: int) -> None:
        self.parent, self.parent_round = parent, parent_round
        self.rounds: list[dict[int, Arrivals]] = [{}]
        self.constants: list[tuple[int, Any]] = []
        self.children: dict[tuple[int, str], Frame] = {}


class Arrivals:
    """What has arrived at a node of what it waits for."""

    __slots__ = ("_dead", "missing", "values")

    def __init__(self, node: Node) -> None:
        self.values: list[Any] = [None] * len(node.inputs)
        self.missing = len(node.inputs) + len(node.controls)
        self._dead = 0

    @property
    def dead(self) -> bool:
        """Whether the node is in a branch that is not taken, and does not run."""
        return self._dead > 0

    def take(self, slot: int, value: Any) -> bool:
        """Notes an input, or with a negative slot that a node it waits for has run. Returns whether it is kept."""
        self.missing -= 1
        if value is DEAD:
            self._dead += 1
        elif slot >= 0:
            self.values[slot] = value
            return True
        return False


class MergeArrivals(Arrivals):
    """The same for a node that takes the first of its inputs that is not dead."""

    __slots__ = ("_inputs",)

    def __init__(self, node: Node) -> None:
        self.values = [None]
        self.missing = 1 + len(node.controls)
        self._dead = 0
        self._inputs = len(node.inputs)

    @property
    def dead(self) -> bool:
        return self.values[0] is None

    def take(self, slot: int, value: Any) -> bool:
        if slot < 0:
            return super().take(slot, value)
        if value is DEAD:
            self._dead += 1
            self.missing -= self._dead == self._inputs
        elif self.values[0] is None:
            self.values[0] = value
            self.missing -= 1
            return True
        return False


class Task(NamedTuple):
    """A node that can run, by its number, in a round of a frame."""

    number: int
    frame: Frame
    round: int
    arrived: Arrivals


class _Queue:
    """The order nodes run in once they can.

    On a GPU to start a kernel is cheap, and one thread starts them as they become ready. On a CPU it hands all but the
    last of those that became ready to its pool of threads, which begins with what came last.
    """

    def __init__(self, nodes: Sequence[Node], gpu: bool) -> None:
        self._cheap = [gpu or node.op in _CHEAP for node in nodes]
        self._inline: collections.deque[Task] = collections.deque()
        self._pool: collections.deque[Task] = collections.deque()

    def begin(self, roots: Sequence[Task]) -> None:
        self._pool.extend(roots)

    def add(self, ready: Sequence[Task]) -> None:
        costly = None
        for task in ready:
            if self._cheap[task.number]:
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

    def next(self) -> Task | None:
        if self._inline:
            return self._inline.popleft()
        return self._pool.popleft() if self._pool else None


class Dataflow:
    """Hands results on to the nodes that wait for them, from round to round and from loop to loop.

    Args:
        nodes: Of the graph.
        memory: Where what has arrived is held until its node has run.
        gpu: Whether kernels are those of a GPU.
    """

    def __init__(self, nodes: Sequence[Node], memory: Memory, gpu: bool) -> None:
        self._nodes = nodes
        self._memory = memory
        self._queue = _Queue(nodes, gpu)
        # Of each node: (consumer, which of its inputs, which output), with -1 for who waits without using a result.
        self._consumers: list[list[tuple[int, int, int]]] = [[] for _ in nodes]
        index = {id(node): number for number, node in enumerate(nodes)}
        for number, node in enumerate(nodes):
            for slot, (source, port) in enumerate(node.inputs):
                self._consumers[index[id(source)]].append((number, slot, port))
            for source in node.controls:
                self._consumers[index[id(source)]].append((number, -1, -1))
        self._moves = {"Enter": self._enter, "NextIteration": self._next_round, "Exit": self._exit}
        main = Frame(None, 0)
        roots = [number for number, node in enumerate(nodes) if not node.inputs and not node.controls]
        self._queue.begin([Task(number, main, 0, Arrivals(nodes[number])) for number in roots])

    def next(self) -> Task | None:
        """What runs now; `None` when the graph has run."""
        return self._queue.next()

    def send(self, task: Task, outputs: Sequence[Any]) -> None:
        """Hands on what a node has made, or `DEAD` values where it did not run."""
        move = self._moves.get(self._nodes[task.number].op)
        if move is not None:
            move(task, outputs)
        else:
            self._deliver(task.number, task.frame, task.round, outputs, task.arrived.dead)

    def _enter(self, task: Task, outputs: Sequence[Any]) -> None:
        attributes, dead = self._nodes[task.number].attributes, task.arrived.dead
        key = (task.round, attributes["frame_name"].s.decode())
        loop = task.frame.children.setdefault(key, Frame(task.frame, task.round))
        if not attributes["is_constant"].b:
            self._deliver(task.number, loop, 0, outputs, dead)
            return
        value = outputs[0]
        loop.constants.append((task.number, value))
        if value is not DEAD:
            self._memory.hold(value)
        for at in range(len(loop.rounds)):
            self._deliver(task.number, loop, at, outputs, dead)

    def _next_round(self, task: Task, outputs: Sequence[Any]) -> None:
        loop, at = task.frame, task.round + 1
        if task.arrived.dead or at > _LONGEST_LOOP:
            return
        if at == len(loop.rounds):
            loop.rounds.append({})
            for number, value in loop.constants:
                self._deliver(number, loop, at, [value], value is DEAD)
        self._deliver(task.number, loop, at, outputs, False)

    def _exit(self, task: Task, outputs: Sequence[Any]) -> None:
        loop = task.frame
        if task.arrived.dead or loop.parent is None:
            return
        for _, value in loop.constants:
            if value is not DEAD:
                self._memory.release(value)
        loop.constants = []
        self._deliver(task.number, loop.parent, loop.parent_round, outputs, False)

    def _deliver(self, number: int, frame: Frame, at: int, outputs: Sequence[Any], dead: bool) -> None:
        ready: list[Task] = []
        waiting = frame.rounds[at]
        for consumer, slot, port in self._consumers[number]:
            arrived = waiting.get(consumer)
            if arrived is None:
                node = self._nodes[consumer]
                arrived = waiting[consumer] = (MergeArrivals if node.op == "Merge" else Arrivals)(node)
            value: Any = outputs[port] if port >= 0 else DEAD if dead else None
            if arrived.take(slot, value):
                self._memory.hold(value)
            if arrived.missing == 0:
                del waiting[consumer]
                ready.append(Task(consumer, frame, at, arrived))
        self._queue.add(ready)
