"""Zeros that a program has once, and therefore in memory.

The gradient of max pooling is scattered into zeros, so they are written to memory. XLA computes what is alike once: a
ReLU of the same shape, and its gradient, then read these zeros instead of knowing the number.
"""

from __future__ import annotations

from collections.abc import Iterable

from oomproof._simulators.xla.program import Node, Sizes, Value

_COMPARING = {"max", "gt", "lt", "ge", "le", "select_n"}


def with_shared_zeros(nodes: Iterable[Node]) -> list[Node]:
    """The operations, with the zeros that the gradients of max pooling share with others as arrays."""
    ordered = list(nodes)
    shared: dict[tuple[Sizes, str], Value | None] = {
        _kind(node.outputs[0]): None for node in ordered if node.name == "select_and_scatter_add"
    }
    found: list[Node] = []
    for node in ordered:
        if node.zero and node.name == "broadcast_in_dim" and shared.get(_kind(node.outputs[0]), node) is None:
            shared[_kind(node.outputs[0])] = node.outputs[0]
        if node.zero and node.name in _COMPARING and node.inputs and (kind := _kind(node.inputs[-1])) in shared:
            zeros = shared[kind]
            if zeros is None:
                like = node.inputs[-1]
                maker = Node("broadcast_in_dim", [], [], node.scope, zero=True)
                zeros = shared[kind] = Value(like.shape, like.dtype, like.size, maker)
                maker.outputs.append(zeros)
                found.append(maker)
            node.inputs.append(zeros)
        if node.name == "select_and_scatter_add" and (zeros := shared[_kind(node.outputs[0])]) is not None:
            node.inputs.append(zeros)
        found.append(node)
    return found


def _kind(value: Value) -> tuple[Sizes, str]:
    return value.shape, value.dtype
