"""A program as XLA is given it, without nesting: arrays, and the operations that make them from others."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

Sizes = tuple[int, ...]


@dataclasses.dataclass(eq=False)
class Value:
    """An array: its bytes, its elements, and what made it (`None` for what the program is given)."""

    shape: tuple[int, ...]
    dtype: str
    size: int
    node: Node | None = None
    users: list[Node] = dataclasses.field(default_factory=list)
    # The number among the program's inputs, and whether the program returns it.
    given: int | None = None
    returned: bool = False

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


@dataclasses.dataclass(frozen=True)
class Convolution:
    """A convolution as XLA is given it.

    Attributes:
        shapes: Of the two operands and the result.
        first: Which dimensions of the first operand count as images and as channels. In gradients by kernels images
            are taken for channels, and channels for images.
        second: Which dimensions of the second operand count as channels of the result, and of the first operand.
        result: Which dimensions of the result count as images and as channels.
        strides: Steps of the window.
        padding: Before and after, for each dimension of an image.
        holes: One more than how many zeros are put between the elements of the first operand.
        window_holes: The same of the second one.
        grouped: Whether channels are convolved in groups.
    """

    shapes: tuple[Sizes, Sizes, Sizes]
    first: tuple[int, int]
    second: tuple[int, int]
    result: tuple[int, int]
    strides: Sizes
    padding: tuple[tuple[int, int], ...]
    holes: Sizes
    window_holes: Sizes
    grouped: bool = False

    @property
    def across(self) -> bool:
        """Whether it is the gradient by the kernel of a transposed convolution with strides."""
        return self.first[0] != 0 and max(self.holes, default=1) > 1

    @property
    def uneven(self) -> bool:
        return any(before != after for before, after in self.padding)


@dataclasses.dataclass(eq=False)
class Node:
    """An operation.

    Attributes:
        name: What JAX calls the operation.
        inputs: Arrays it reads. Numbers written into the program are not among them.
        outputs: Arrays it makes.
        scope: The scopes it was traced in, among them the names of layers.
        axes: For a reduction, those it reduces.
        convolution: For a convolution, how it is made.
        zero: Whether one of its operands is a zero, repeated.
        bodies: For a loop or a condition, what it runs.
        carried: For a loop, how many of its results are handed from round to round. The others are stacked.
        scratch: Bytes it is known to need while it runs.
        workspace: Bytes that the autotuner is expected to give it to work in, on a GPU.
        index: Its place in the program.
    """

    name: str
    inputs: list[Value]
    outputs: list[Value]
    scope: str = ""
    axes: tuple[int, ...] = ()
    convolution: Convolution | None = None
    zero: bool = False
    bodies: list[Program] = dataclasses.field(default_factory=list)
    carried: int = 0
    scratch: int = 0
    workspace: int = 0
    index: int = 0


@dataclasses.dataclass
class Program:
    nodes: list[Node]
    inputs: list[Value]
    outputs: list[Value | None]


def linked(nodes: list[Node], inputs: list[Value], outputs: Sequence[Value | None]) -> Program:
    """The program of these operations, without those that nobody needs. Where an output is a number, it is `None`."""
    for number, value in enumerate(inputs):
        value.given = number
    for output in outputs:
        if output is not None:
            output.returned = True
    kept = _needed(nodes, outputs)
    for index, node in enumerate(kept):
        node.index = index
        for value in dict.fromkeys(node.inputs):
            value.users.append(node)
    return Program(kept, inputs, list(outputs))


def _needed(nodes: list[Node], outputs: Sequence[Value | None]) -> list[Node]:
    wanted = {id(value) for value in outputs}
    kept = []
    for node in reversed(nodes):
        if any(id(value) in wanted for value in node.outputs):
            kept.append(node)
            wanted.update(map(id, node.inputs))
    return kept[::-1]
