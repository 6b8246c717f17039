"""Runs a graph the way TensorFlow's executor does, with sizes in the place of tensors.

A node runs when its inputs are there, a tensor is freed when the last node that needs it has run, and loops run as
often as they would: their counters are the only numbers that are computed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from oomproof._records.patience import look_at_the_clock
from oomproof._simulators.tensorflow.convolutions import CONVOLUTIONS
from oomproof._simulators.tensorflow.dataflow import Dataflow
from oomproof._simulators.tensorflow.graph import Node, StepGraph, TensorType
from oomproof._simulators.tensorflow.kernels import Kernel, kernel_of
from oomproof._simulators.tensorflow.memory import Memory
from oomproof._simulators.tensorflow.tensor_lists import TensorLists
from oomproof._simulators.tensorflow.values import COMPUTED, DEAD, Block, Run, Value, shape_at_run_time
from oomproof._simulators.tensorflow.variables import Variables

_OPEN_LOOP = "A loop whose end depends on data is not counted: how often it runs is only known when it does."


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
        self._memory = Memory()
        self._dataflow = Dataflow(graph.nodes, self._memory, gpu)
        self._notes: list[str] = []
        # Ops that are no kernels.
        self._runs: dict[str, Run] = {
            "Switch": self._switch,
            "Merge": self._merge,
            "LoopCond": self._loop_condition,
            "NoOp": self._nothing,
            **Variables(graph.variables, self._memory).runs,
            **TensorLists(self._memory).runs,
        }

    def run(self) -> Execution:
        memory = self._memory
        while (task := self._dataflow.next()) is not None:
            look_at_the_clock()
            node, arrived = self._nodes[task.number], task.arrived
            outputs = [DEAD] * max(len(node.outputs), 1) if arrived.dead else self._compute(node, arrived.values)
            made = [value for value in outputs if isinstance(value, Value)]
            for value in made:
                # A result that is an input must not be freed in between.
                memory.hold(value)
            for value in arrived.values:
                if isinstance(value, Value):
                    if isinstance(value.held, Block):
                        value.held.last_user = node
                    memory.release(value)
            self._dataflow.send(task, outputs)
            # What the step returns is kept.
            if node.name not in self._results:
                for value in made:
                    memory.release(value)
        return Execution(memory.ran, memory.blocks, self._notes)

    # Kernels

    def _compute(self, node: Node, inputs: Sequence[Value]) -> Sequence[Any]:
        run = self._runs.get(node.op)
        if run is not None:
            return run(node, inputs)
        types = [self._type(node, kind, inputs) for kind in node.outputs]
        kernel = kernel_of(node, [value.type for value in inputs], types, self._gpu)
        if kernel.same:
            return [Value(kind, v.held, v.number, v.variable) for kind, v in zip(types, inputs, strict=False)]
        if kernel.host:
            return [Value(kind, None, _number(node, inputs)) for kind in types]
        made = self._constant(node, types) if node.op == "Const" else self._launch(node, kernel, inputs, types)
        made[0].number = _number(node, inputs)
        return made

    def _constant(self, node: Node, types: Sequence[TensorType]) -> list[Value]:
        """What is there before the step, and stays."""
        return [Value(kind, self._memory.block(kind.size, node, -1) if kind.size else None) for kind in types]

    def _launch(self, node: Node, kernel: Kernel, inputs: Sequence[Value], types: Sequence[TensorType]) -> list[Value]:
        """The results of a kernel, each with memory of its own or in that of an input."""
        memory, before = self._memory, len(self._memory.blocks)
        scratch = [*kernel.scratch, *_copied_first(kernel, inputs)]
        # Convolutions have their results allocated first; what others work in comes before those.
        results_first = node.op in CONVOLUTIONS
        for size in () if results_first else scratch:
            memory.scratch(size, node, kernel.fixed)
        made = [self._result(node, kind, inputs if kernel.in_place else ()) for kind in types]
        for size in scratch if results_first else ():
            memory.scratch(size, node, kernel.fixed)
        if len(memory.blocks) > before:
            memory.ran.append(node)
        return made

    def _result(self, node: Node, kind: TensorType, reusable: Sequence[Value]) -> Value:
        for value in reusable:
            held = value.held
            if (
                isinstance(held, Block)
                and held.users == 1
                and value.type.size == kind.size
                and value.type.dtype == kind.dtype
            ):
                return Value(kind, held)
        return Value(kind, self._memory.block(kind.size, node) if kind.size else None)

    def _type(self, node: Node, kind: TensorType, inputs: Sequence[Value]) -> TensorType:
        if kind.known or kind.dtype in ("variant", "resource"):
            return kind
        return TensorType(shape_at_run_time(node.op, kind.shape, [value.type.shape for value in inputs]), kind.dtype)

    # Control flow

    def _switch(self, node: Node, inputs: Sequence[Value]) -> Sequence[Any]:
        data, predicate = inputs
        # What is decided by data is taken to go the way that does more: an update that is made rather than skipped.
        taken = True if predicate.number is None else bool(predicate.number)
        value = Value(data.type, data.held, data.number)
        return [DEAD, value] if taken else [value, DEAD]

    def _merge(self, node: Node, inputs: Sequence[Value]) -> Sequence[Any]:
        value = inputs[0]
        return [Value(value.type, value.held, value.number), Value(TensorType((), "int32"), None)]

    def _loop_condition(self, node: Node, inputs: Sequence[Value]) -> Sequence[Any]:
        going_on = inputs[0].number
        if going_on is None and _OPEN_LOOP not in self._notes:
            self._notes.append(_OPEN_LOOP)
        return [Value(inputs[0].type, None, going_on or False)]

    def _nothing(self, node: Node, inputs: Sequence[Value]) -> Sequence[Any]:
        return []


def _number(node: Node, inputs: Sequence[Value]) -> Any:
    """The value of a result that steers the computation; `None` for all others."""
    computed = COMPUTED.get(node.op)
    if computed is not None and all(value.number is not None for value in inputs):
        return computed(*(value.number for value in inputs))
    return node.value


def _copied_first(kernel: Kernel, inputs: Sequence[Value]) -> Sequence[int]:
    """Bytes of the input that the kernel writes over, where others need that."""
    if kernel.overwrites is None:
        return ()
    value = inputs[kernel.overwrites]
    return (value.type.size,) if value.held is not None and value.held.users > 1 else ()
