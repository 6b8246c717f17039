"""A planned program as a trace: its kernels as ops, its arrays as buffers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from oomproof._records.trace import Allocator, Buffer, Category, Op, Stage, Trace
from oomproof._simulators.xla.kernels import Kernel
from oomproof._simulators.xla.program import Node, Program, Value
from oomproof._simulators.xla.schedule import Plan


@dataclasses.dataclass(frozen=True)
class Role:
    """What a value of the state, or a tensor of the batch, is: its category and the path of its layer."""

    category: Category
    layer: str


# The part of the step and the path of the layer an operation belongs to.
Places = Callable[[Node], tuple[Stage, str]]


class Writer:
    """Turns a plan into ops and buffers.

    Args:
        program: What is computed.
        plan: When.
        settled: Results, by `id`, that are written over the state.
        roles: What each input of the program is.
        places: Where each operation belongs.
    """

    def __init__(
        self,
        program: Program,
        plan: Plan,
        settled: set[int],
        roles: Sequence[Role],
        places: Places,
    ) -> None:
        self._program = program
        self._plan = plan
        self._settled = settled
        self._roles = roles
        self._layers: dict[int, str] = {}
        self._of_backward: set[int] = set()
        self._ops: list[Op] = []
        for value in program.inputs:
            self._layers[id(value)] = self._role(value).layer
        for kernel in plan.kernels:
            self._op(kernel, *places(kernel.node))

    def trace(self, allocator: Allocator, notes: tuple[str, ...]) -> Trace:
        count = len(self._ops)
        buffers = [
            Buffer(value.size, -1, count, self._role(value).category, self._role(value).layer)
            for value in self._program.inputs
        ]
        readers = self._readers()
        for index, kernel in enumerate(self._plan.kernels):
            for value in kernel.makes:
                if (span := self._plan.spans.get(id(value))) is not None:
                    category = self._category(index, readers.get(id(value), []))
                    buffers.append(Buffer(value.size, *span, category, self._layers[id(value)]))
            if kernel.scratch:
                buffers.append(Buffer(kernel.scratch, index, index, "temporary", self._ops[index].layer))
            workspace = kernel.node.workspace
            buffers.append(Buffer(workspace, index, index, "temporary", self._ops[index].layer, workspace=True))
        return Trace(allocator, tuple(self._ops), tuple(b for b in buffers if b.size), notes)

    def _role(self, value: Value) -> Role:
        assert value.given is not None
        return self._roles[value.given]

    def _op(self, kernel: Kernel, stage: Stage, layer: str) -> None:
        if not layer:
            # The loss, or the optimizer: said of the layer whose result or weight is the most of what it works on.
            named = [value for value in kernel.reads if self._layers.get(id(value))]
            layer = self._layers[id(max(named, key=lambda value: value.size))] if named else ""
        if kernel.node.scope == "" and any(id(value) in self._settled for value in kernel.makes):
            stage = "update"
        if stage == "forward" and any(id(value) in self._of_backward for value in kernel.reads):
            # Sums of gradients, and gradients that a layer computes itself, may have no scope that says so.
            stage = "backward"
        if stage == "backward":
            self._of_backward.update(map(id, kernel.makes))
        self._ops.append(Op(kernel.node.name, stage, layer))
        self._layers.update((id(value), layer) for value in kernel.makes)

    def _readers(self) -> dict[int, list[Stage]]:
        readers: dict[int, list[Stage]] = {}
        for op, kernel in zip(self._ops, self._plan.kernels, strict=True):
            for value in kernel.reads:
                readers.setdefault(id(value), []).append(op.stage)
        return readers

    def _category(self, index: int, readers: list[Stage]) -> Category:
        stage = self._ops[index].stage
        if stage == "forward" and "backward" in readers:
            return "activations"
        return "gradients" if stage == "backward" and "update" in readers else "temporary"
