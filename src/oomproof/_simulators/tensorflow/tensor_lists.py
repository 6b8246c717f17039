"""Lists of tensors, by which loops keep what their backward pass needs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from oomproof._simulators.tensorflow.graph import Node, TensorType
from oomproof._simulators.tensorflow.memory import Memory
from oomproof._simulators.tensorflow.values import Items, Run, Value


class TensorLists:
    """What ops on lists do to the tensors in them.

    A list that others hold, too, is copied before it is changed; its tensors are not.

    Attributes:
        runs: What ops on lists do.
    """

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self.runs: dict[str, Run] = {
            "EmptyTensorList": self._empty,
            "TensorListReserve": self._reserve,
            "TensorListFromTensor": self._from_tensor,
            "TensorListPushBack": self._push,
            "TensorListPopBack": self._pop,
            "TensorListSetItem": self._set,
            "TensorListGetItem": self._get,
            "TensorListStack": self._stack,
            "TensorListLength": self._length,
        }

    def _empty(self, node: Node, inputs: Sequence[Value]) -> Sequence[Any]:
        return [Value(node.outputs[0], Items([]))]

    def _reserve(self, node: Node, inputs: Sequence[Value]) -> Sequence[Any]:
        length = 0 if inputs[1].number is None else int(inputs[1].number)
        return [Value(node.outputs[0], Items([None] * length))]

    def _from_tensor(self, node: Node, inputs: Sequence[Value]) -> Sequence[Any]:
        shape = inputs[0].type.shape or (0,)
        kind = TensorType(shape[1:], inputs[0].type.dtype)
        items = [Value(kind, self._memory.block(kind.size, node)) for _ in range(shape[0])]
        self._memory.ran.append(node)
        return [Value(node.outputs[0], self._holding(items))]

    def _push(self, node: Node, inputs: Sequence[Value]) -> Sequence[Any]:
        items = self._own(inputs[0])
        items.items.append(inputs[1])
        self._memory.hold(inputs[1])
        return [Value(node.outputs[0], items)]

    def _pop(self, node: Node, inputs: Sequence[Value]) -> Sequence[Any]:
        items = self._own(inputs[0])
        last = items.items.pop() if items.items else None
        if last is None:
            return [Value(node.outputs[0], items), self._memory.result(node, node.outputs[1])]
        popped = Value(last.type, last.held, last.number)
        if last.held is not None:
            # The list's use of it ends once the result has its own.
            last.held.users -= 1
        return [Value(node.outputs[0], items), popped]

    def _set(self, node: Node, inputs: Sequence[Value]) -> Sequence[Any]:
        items, at = self._own(inputs[0]), inputs[1].number
        place = None if at is None else int(at)
        if place is None or place >= len(items.items):
            place = len(items.items)
            items.items.append(None)
        old = items.items[place]
        if old is not None:
            self._memory.release(old)
        items.items[place] = inputs[2]
        self._memory.hold(inputs[2])
        return [Value(node.outputs[0], items)]

    def _get(self, node: Node, inputs: Sequence[Value]) -> Sequence[Any]:
        held, at = inputs[0].held, inputs[1].number
        items = held.items if isinstance(held, Items) else []
        found = items[int(at)] if at is not None and int(at) < len(items) else None
        if found is None:
            kind = node.outputs[0]
            known = next((item.type for item in items if item is not None), kind)
            return [self._memory.result(node, kind if kind.known else known)]
        return [Value(found.type, found.held, found.number)]

    def _stack(self, node: Node, inputs: Sequence[Value]) -> Sequence[Any]:
        held, kind = inputs[0].held, node.outputs[0]
        items = [item for item in held.items if item is not None] if isinstance(held, Items) else []
        if items and not kind.known and isinstance(held, Items):
            kind = TensorType((len(held.items), *(items[0].type.shape or ())), kind.dtype)
        return [self._memory.result(node, kind)]

    def _length(self, node: Node, inputs: Sequence[Value]) -> Sequence[Any]:
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
                self._memory.hold(item)
        return Items(list(items))
