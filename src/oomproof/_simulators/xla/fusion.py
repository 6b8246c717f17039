"""Which results of a program XLA keeps in memory, and which it computes again inside whatever reads them.

What is cheap and element by element has no memory of its own when everything that reads it can do the arithmetic
itself; then what it was computed from has to stay instead. Matrix products, convolutions, loops, sorts and scatters
read and write memory; reductions read through what leads to them, and write.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Iterable

from oomproof._simulators.xla.kernels import Kernel, prepared
from oomproof._simulators.xla.priorities import fused
from oomproof._simulators.xla.program import Node, Program, Value
from oomproof._simulators.xla.schedule import planned

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
# Columns of no more elements are summed in one pass.
_SHORT = 4096
# What Triton's matrix products do not compute, and by how many bytes what they read instead may be more.
_NOT_IN_PRODUCTS = {"erf", "erfc", "erf_inv", "pow", "random_bits", "nextafter", "rem"}
_TOLERATED = 1024
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


def computed_in_product(value: Value) -> list[Value]:
    """What a matrix product reads for an operand: XLA's own kernels compute it from that, where that is no more.

    That is so of one array changed element by element, be it with numbers or with an input of the program that is
    repeated, such as a bias.
    """
    node = value.node
    if node is None or node.name in _NOT_IN_PRODUCTS | _MOVES or is_opaque(node) or is_reduction(node):
        return [value]
    small = [each for each in node.inputs if _is_repeated_input(each, value)]
    large = [each for each in node.inputs if each not in small]
    alike = len(large) == 1 and large[0].elements == value.elements and len(small) <= 1
    if not alike or large[0].size > value.size + _TOLERATED:
        return [value]
    given = [v for each in small for v in ([each] if each.node is None else each.node.inputs)]
    return [*computed_in_product(large[0]), *given]


def _is_repeated_input(value: Value, result: Value) -> bool:
    """Whether it is an input of the program, or a number, repeated to be as large as a result."""
    if value.node is None:
        return value.elements < result.elements
    return value.node.name == "broadcast_in_dim" and all(source.given is not None for source in value.node.inputs)


def _with_conversion(node: Node) -> Node:
    """A matrix product that writes its result in the precision which alone is wanted of it."""
    result = node.outputs[0]
    if node.name != "dot_general" or result.returned or len(result.users) != 1:
        return node
    converted = result.users[0].outputs[0]
    if result.users[0].name != "convert_element_type" or converted.size > result.size:
        return node
    converted.node = dataclasses.replace(node, outputs=[converted])
    return converted.node


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
        nodes = [_with_conversion(node) for node in program.nodes] if fuse else program.nodes
        self._sources = {id(node): self._sources_of(node) for node in nodes}
        self._needed = {id(value) for value in program.outputs if value is not None}
        self._nodes: list[Node] = []
        for node in reversed(nodes):
            if any(id(value) in self._needed and value.node is node for value in node.outputs):
                self._nodes.insert(0, node)
                self._needed.update(map(id, self._sources[id(node)]))
        self._roots: dict[int, tuple[Value, ...]] = {}
        self._moved: dict[int, set[int]] = {}
        # Kernels of convolutions in the order cuDNN wants them, by the array they are a copy of.
        self._reordered: dict[int, Kernel] = {}
        if fuse:
            self._decide()
        self._readers = collections.Counter(
            id(value)
            for node in self._nodes
            if any(self.in_memory(value) for value in node.outputs)
            for value in self._read(self._sources[id(node)])
        )
        self.kernels: list[Kernel] = []
        for node in self._nodes:
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

    def _sources_of(self, node: Node) -> list[Value]:
        """What an operation reads, but for what is fused into it in the end."""
        values = [self._folded.get(id(value), value) for value in node.inputs]
        if self._fuse and node.name == "dot_general":
            values = [source for value in values for source in computed_in_product(value)]
        return list({id(value): value for value in values}.values())

    def _decide(self) -> None:
        kept: set[int] = set()
        for node in self._nodes:
            if is_opaque(node):
                # Scatters add to the first of what they read, where it is, and compute the rest themselves.
                reads = self._sources[id(node)]
                kept.update(map(id, reads[:1] if node.name.startswith("scatter") else reads))
            elif node.name == "select_and_scatter_add":
                # The zeros it adds to.
                kept.update(map(id, node.inputs[2:]))

        def fusible(value: Value) -> bool:
            node = value.node
            assert node is not None
            if value.returned or id(value) in kept or is_opaque(node) or is_reduction(node):
                return False
            return len(value.users) < 2 or not any(map(_is_short, value.users))

        gone = fused(self._nodes, lambda node: self._sources[id(node)], fusible)
        for node in self._nodes:
            for value in node.outputs:
                if id(value) in gone:
                    self._roots[id(value)] = self._read(self._sources[id(node)])
                    self._moved[id(value)] = self._moved_by(node)

    def _moved_by(self, node: Node) -> set[int]:
        """Arrays, by `id`, of which an operation does not read just the element it computes."""
        sources = self._sources[id(node)]
        if node.name in _MOVES - {"select_n"}:
            return set(map(id, self._read(sources)))
        return {key for value in sources for key in self._moved.get(id(value), ())}

    def in_memory(self, value: Value) -> bool:
        return id(value) not in self._roots

    def roots(self, value: Value) -> tuple[Value, ...]:
        """The arrays in memory that a value is computed from."""
        return self._roots.get(id(value), (value,))

    def _read(self, values: Iterable[Value]) -> tuple[Value, ...]:
        return tuple({id(root): root for value in values for root in self.roots(value)}.values())

    def _add(self, node: Node) -> None:
        makes = [value for value in node.outputs if self.in_memory(value) and id(value) in self._needed]
        if not makes:
            return
        reads = list(self._read(self._sources[id(node)]))
        kernel = Kernel(node, reads, makes, [], node.scratch)
        if node.name == "conv_general_dilated" and self._fuse:
            first, *weights = self._sources[id(node)]
            kernel.reads = list(self._read([first])) + [self._reorder(value) for value in self._read(weights)]
        elif node.name.startswith("scatter"):
            kernel.in_place = list(self._read(node.inputs[:1]))
        elif self._fuse and not is_opaque(node) and not is_reduction(node):
            # Each element is written over one that nobody else reads.
            moved = self._moved_by(node)
            kernel.in_place = [v for v in reads if id(v) not in moved and self._readers[id(v)] == 1]
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
