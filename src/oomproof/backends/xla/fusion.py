"""Which results of a program XLA keeps in memory, and which it computes again inside whatever reads them.

What is cheap and element by element has no memory of its own when everything that reads it can do the arithmetic
itself; then what it was computed from has to stay instead. Matrix products, convolutions, loops, sorts and scatters
read and write memory; reductions read through what leads to them, and write.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from oomproof.backends.xla.kernels import Kernel, prepared
from oomproof.backends.xla.program import Node, Program, Value
from oomproof.backends.xla.schedule import planned

# Read memory, write memory.
_OPAQUE = {"dot_general", "conv_general_dilated", "scan", "while", "cond", "sort", "top_k"}
_OPAQUE |= {"rnn_fwd", "rnn_bwd", "ffi_call", "custom_call", "fft", "rng_bit_generator", "constant"}
# Read through what leads to them, and write.
_REDUCTIONS = {"argmax", "argmin", "cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp", "select_and_gather_add"}
_REDUCTIONS |= {"select_and_scatter_add"}
# Read their operands in any order.
_FOLDING = {"dot_general", "conv_general_dilated"}
# Move elements around, so that shapes differ.
_MOVES = {"broadcast_in_dim", "transpose", "slice", "dynamic_slice", "dynamic_update_slice", "pad", "concatenate"}
_MOVES |= {"rev", "gather", "iota", "select_n", "random_bits", "random_split", "random_fold_in", "random_seed", "split"}
# What an element of each costs, next to an addition.
_COSTS = {
    "random_bits": 200,
    "exp": 8,
    "exp2": 8,
    "log": 8,
    "log1p": 10,
    "tanh": 10,
    "logistic": 10,
    "erf": 100,
    "erfc": 100,
}
_COSTS |= {"erf_inv": 30, "pow": 20, "sin": 15, "cos": 15, "integer_pow": 2, "div": 4, "sqrt": 4, "rsqrt": 4}
# Above this an element is computed once and kept, unless only one reads it.
_DEAR = 100
# Columns of no more elements are summed in one pass.
_SHORT = 4096
_SQUARES = {"square", "integer_pow"}


def is_opaque(node: Node) -> bool:
    name = node.name
    if name in _OPAQUE or name.startswith("scatter"):
        return True
    if name in _MOVES or is_reduction(node):
        return False
    # What is left of JAX's primitives works element by element; unknown ones are known by their shapes.
    largest = max((value.elements for value in node.inputs), default=1)
    return any(value.elements < largest for value in node.outputs)


def is_reduction(node: Node) -> bool:
    return node.name.startswith("reduce") or node.name in _REDUCTIONS


def _is_short(node: Node) -> bool:
    """Whether it is the square in a variance of few samples, whose deviations XLA keeps."""
    users = node.outputs[0].users
    if node.name not in _SQUARES or len(users) != 1 or users[0].name != "reduce_sum":
        return False
    source, axes = users[0].inputs[0], users[0].axes
    return len(source.shape) - 1 not in axes and math.prod(source.shape[axis] for axis in axes) <= _SHORT


class Fusion:
    """What is in memory, and the kernels that put it there, in the program's order.

    Args:
        program: What is to be computed.
        fuse: Whether operations are fused at all.
    """

    def __init__(self, program: Program, fuse: bool = True) -> None:
        self._program = program
        self._fuse = fuse
        self._folded = self._folds() if fuse else {}
        self._costs: dict[int, int] = {}
        self._roots: dict[int, tuple[Value, ...]] = {}
        # Kernels of convolutions in the order cuDNN wants them, by the array they are a copy of.
        self._reordered: dict[int, Kernel] = {}
        for node in program.nodes:
            self._decide(node)
        self.kernels: list[Kernel] = []
        for node in program.nodes:
            self._add(node)
        if fuse:
            self.kernels = [*self._reordered.values(), *prepared(self.kernels)]

    def _folds(self) -> dict[int, Value]:
        """Operands that a matrix product or convolution reads in another order, which costs it nothing."""
        folded: dict[int, Value] = {}
        for node in self._program.nodes:
            result = node.outputs[0]
            reordered = node.name in ("transpose", "rev") and not result.returned
            if reordered and all(user.name in _FOLDING for user in result.users):
                source = node.inputs[0]
                folded[id(result)] = folded.get(id(source), source)
        return folded

    def _decide(self, node: Node) -> None:
        cost = _COSTS.get(node.name, 1) + max((self._costs.get(id(v), 0) for v in node.inputs), default=0)
        fusible = self._fuse and not is_opaque(node) and not is_reduction(node)
        for value in node.outputs:
            kept = value.returned or any(map(is_opaque, value.users))
            if len(value.users) > 1:
                kept = kept or cost > _DEAR or any(map(_is_short, value.users))
            if id(value) in self._folded:
                self._roots[id(value)] = self._read([self._folded[id(value)]])
            elif fusible and not kept:
                self._roots[id(value)] = self._read(node.inputs)
                self._costs[id(value)] = cost

    def in_memory(self, value: Value) -> bool:
        return id(value) not in self._roots

    def roots(self, value: Value) -> tuple[Value, ...]:
        """The arrays in memory that a value is computed from."""
        return self._roots.get(id(value), (value,))

    def _read(self, values: Iterable[Value]) -> tuple[Value, ...]:
        return tuple({id(root): root for value in values for root in self.roots(value)}.values())

    def _add(self, node: Node) -> None:
        makes = [value for value in node.outputs if self.in_memory(value) and (value.users or value.returned)]
        if not makes:
            return
        reads = list(self._read(node.inputs))
        kernel = Kernel(node, reads, makes, [], node.scratch)
        if node.name == "conv_general_dilated" and self._fuse:
            weights = self._read(node.inputs[1:])
            kernel.reads = list(self._read(node.inputs[:1])) + [self._reorder(value) for value in weights]
        elif node.name.startswith("scatter"):
            kernel.in_place = reads[:1]
        elif node.bodies:
            kernel.scratch, node.workspace = _inside(node, self._fuse)
        self.kernels.append(kernel)

    def _reorder(self, value: Value) -> Value:
        """cuDNN wants the output channels of a kernel first, Keras has them last: a copy, kept while it is needed."""
        if value.given is None:
            return value
        if id(value) not in self._reordered:
            copy = Value(value.shape, value.dtype, value.size)
            node = Node("transpose", [value], [copy])
            self._reordered[id(value)] = Kernel(node, [value], [copy], [])
        return self._reordered[id(value)].makes[0]


def _inside(node: Node, fuse: bool) -> tuple[int, int]:
    """Bytes a loop or branch needs besides what it reads and what it makes: what is known, and workspaces on top."""
    needs = []
    for program in node.bodies:
        carried = node.carried if node.name == "scan" else len(program.outputs)
        settled = {
            id(value)
            for index, value in enumerate(program.outputs)
            # What is stacked, or carried and written a part of, is written where it is.
            if value is not None and (index >= carried or (value.node and value.node.name == "dynamic_update_slice"))
        }
        needs.append(planned(Fusion(program, fuse).kernels, settled))
    known = max((plan.known for plan in needs), default=0)
    return known, max((plan.peak for plan in needs), default=0) - known
