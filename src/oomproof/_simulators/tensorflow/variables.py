"""What is kept from step to step while a graph runs: read, replaced, and written in place or to a copy."""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import Any

from oomproof._simulators.tensorflow.graph import Node, TensorType, Variable
from oomproof._simulators.tensorflow.memory import Memory
from oomproof._simulators.tensorflow.values import Block, Run, Value


class Variables:
    """The values that variables have, by the name of the node that stands for each.

    Attributes:
        runs: What ops on variables do.
    """

    def __init__(self, variables: Sequence[Variable], memory: Memory) -> None:
        self._memory = memory
        self._values: dict[str, Block] = {}
        for variable in variables:
            block = memory.block(variable.size, None, -1)
            block.variable = variable
            if variable.node:
                self._values[variable.node] = block
        # TensorFlow makes one tensor for all slots of a shape, since all begin as the same number.
        self._alike = collections.Counter(v.shape for v in variables if v.category == "optimizer" and v.node)
        updates = ("AssignAddVariableOp", "AssignSubVariableOp")
        scatters = ("ResourceScatterAdd", "ResourceScatterSub", "ResourceScatterUpdate")
        self.runs: dict[str, Run] = {
            "VarHandleOp": self._handle,
            "ReadVariableOp": self._read,
            "AssignVariableOp": self._assign,
            **dict.fromkeys((*updates, *scatters), self._update),
        }

    def _handle(self, node: Node, inputs: Sequence[Value]) -> Sequence[Any]:
        return [Value(node.outputs[0], None, None, node.name)]

    def _read(self, node: Node, inputs: Sequence[Value]) -> Sequence[Any]:
        return [Value(node.outputs[0], self._values.get(inputs[0].variable or ""))]

    def _assign(self, node: Node, inputs: Sequence[Value]) -> Sequence[Any]:
        name, held = inputs[0].variable, inputs[1].held
        if name is None or name not in self._values:
            return []
        if isinstance(held, Block) and held.users == 1:
            self._replace(name, held)
        elif self._values[name].users > 1:
            self._copy(node, name)
        return []

    def _update(self, node: Node, inputs: Sequence[Value]) -> Sequence[Any]:
        """Written in place, or to a copy while somebody still reads the old value."""
        name = inputs[0].variable
        if name is None or name not in self._values:
            return []
        current = self._values[name]
        if current.users > 1:
            self._copy(node, name)
        elif current.first < 0 and self._shares_its_place(current):
            # In the very first step it gets one of its own here.
            current.first = self._memory.now
            self._memory.ran.append(node)
        return []

    def _shares_its_place(self, slot: Block) -> bool:
        """Whether others begin in the same place. The last one keeps it."""
        if slot.variable is None or slot.variable.category != "optimizer":
            return False
        self._alike[slot.variable.shape] -= 1
        return self._alike[slot.variable.shape] > 0

    def _copy(self, node: Node, name: str) -> None:
        block = self._memory.block(self._values[name].size, node)
        self._memory.ran.append(node)
        self._replace(name, block)

    def _replace(self, name: str, block: Block) -> None:
        current = self._values[name]
        block.users += 1
        block.variable = current.variable
        self._values[name] = block
        self._memory.release(Value(TensorType((), "resource"), current))
