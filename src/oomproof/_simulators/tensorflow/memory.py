"""The memory that nodes take while a graph runs: what was allocated, who holds on to it, and when it is free again."""

from __future__ import annotations

from oomproof._simulators.tensorflow.graph import Node, TensorType
from oomproof._simulators.tensorflow.values import Block, Items, Value


class Memory:
    """Every allocation of a run. Time is counted in the nodes that allocated something.

    Attributes:
        ran: The nodes that allocated something, in order.
        blocks: Every allocation, in order.
    """

    def __init__(self) -> None:
        self.ran: list[Node] = []
        self.blocks: list[Block] = []

    @property
    def now(self) -> int:
        return len(self.ran)

    def block(self, size: int, node: Node | None, start: int | None = None) -> Block:
        """Allocates, now unless `start` says when. Whoever does so for a node adds it to `ran` when it is done."""
        block = Block(size, node, self.now if start is None else start)
        self.blocks.append(block)
        return block

    def scratch(self, size: int, node: Node, fixed: bool) -> None:
        """Allocates what is free again as soon as the node has run."""
        block = self.block(size, node)
        block.end, block.fixed = self.now, fixed

    def result(self, node: Node, kind: TensorType) -> Value:
        """A new tensor, the only allocation of its node."""
        value = Value(kind, self.block(kind.size, node))
        self.ran.append(node)
        return value

    def hold(self, value: Value) -> None:
        """One more needs the value."""
        if value.held is not None:
            value.held.users += 1

    def release(self, value: Value) -> None:
        """One less needs the value, which is free after the last one."""
        held = value.held
        if held is None:
            return
        held.users -= 1
        if held.users:
            return
        if isinstance(held, Items):
            for item in held.items:
                if item is not None:
                    self.release(item)
        else:
            held.end = self.now - 1
