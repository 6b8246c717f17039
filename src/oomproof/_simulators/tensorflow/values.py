"""What takes the place of tensors while a graph is traced."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np

from oomproof._simulators.tensorflow.graph import Node, TensorType, Variable


@dataclasses.dataclass(slots=True, eq=False)
class Block:
    """An allocation.

    Attributes:
        node: The node that asked for it; `None` for a variable.
        users: How many hold on to it.
        last_user: The last node that used it.
        variable: The variable whose value it is.
        fixed: Whether it is as large for a part of the batch.
        first: Of a variable's: when it is allocated in the very first step, if it is not there before.
    """

    size: int
    node: Node | None
    start: int
    end: int | None = None
    users: int = 0
    last_user: Node | None = None
    variable: Variable | None = None
    fixed: bool = False
    first: int = -1

    def __post_init__(self) -> None:
        if self.start < 0:
            self.users = 1


@dataclasses.dataclass(slots=True, eq=False)
class Items:
    """A list of tensors, itself a tensor to TensorFlow."""

    items: list[Value | None]
    users: int = 0
    start: int = -1


@dataclasses.dataclass(slots=True, eq=False)
class Value:
    """A tensor.

    Attributes:
        held: Where its bytes are; `None` for what is on the host or has none.
        number: Its value, for the few that steer the computation.
        variable: For the handle of a variable, the name of its node.
    """

    type: TensorType
    held: Block | Items | None
    number: Any = None
    variable: str | None = None


# What an op makes of its inputs: results, or `DEAD` in the branch that is not taken.
Run = Callable[[Node, Sequence[Value]], Sequence[Any]]
Shape = tuple[int, ...] | None

# What arrives from the branch that was not taken.
DEAD: Final = object()

COMPUTED: dict[str, Callable[..., Any]] = {
    "Add": np.add,
    "AddV2": np.add,
    "Sub": np.subtract,
    "Mul": np.multiply,
    "Minimum": np.minimum,
    "Maximum": np.maximum,
    "Less": np.less,
    "LessEqual": np.less_equal,
    "Greater": np.greater,
    "GreaterEqual": np.greater_equal,
    "Equal": np.equal,
    "NotEqual": np.not_equal,
    "LogicalAnd": np.logical_and,
    "LogicalOr": np.logical_or,
    "LogicalNot": np.logical_not,
}


def shape_at_run_time(op: str, known: Shape, inputs: Sequence[Shape]) -> Shape:
    """The shape of a result that TensorFlow could not infer, from the shapes its inputs have in this run."""
    if op in ("GatherV2", "ResourceGather") and inputs[0] is not None and inputs[1] is not None:
        return (*inputs[1], *inputs[0][1:])
    if known is None:
        return _broadcast(inputs)
    # Sizes that depend on data, such as how many rows of a table a batch uses, are those of what they are chosen from.
    alike = [shape for shape in inputs if shape is not None and len(shape) == len(known)]
    return tuple(
        size if size >= 0 else max((shape[axis] for shape in alike), default=1) for axis, size in enumerate(known)
    )


def _broadcast(shapes: Sequence[Shape]) -> Shape:
    """The shape of what is computed element by element."""
    known = [shape for shape in shapes if shape is not None]
    rank = max(map(len, known), default=0)
    padded = [(1,) * (rank - len(shape)) + shape for shape in known]
    return tuple(max(sizes) for sizes in zip(*padded, strict=True)) if known else None
