"""What the GPU is told to do, and what XLA does besides: arrays set to zero, and copies in another order."""

from __future__ import annotations

import dataclasses

from oomproof._simulators.xla.program import Node, Value


@dataclasses.dataclass(eq=False)
class Kernel:
    """One thing the GPU is told to do.

    Attributes:
        node: The operation its results come from.
        reads: Arrays in memory.
        makes: Arrays it writes.
        in_place: Arrays among those it reads whose memory one of its results may take over.
        scratch: Bytes it needs while it runs, besides.
    """

    node: Node
    reads: list[Value]
    makes: list[Value]
    in_place: list[Value]
    scratch: int = 0


def prepared(kernels: list[Kernel]) -> list[Kernel]:
    """The kernels, and in their places those that get something ready for them."""
    added: dict[int, list[Kernel]] = {}
    _stack_early(kernels, added)
    _pooling(kernels, added)
    _copies_across(kernels, added)
    return [one for index, kernel in enumerate(kernels) for one in (*added.get(index, ()), kernel)]


def _stack_early(kernels: list[Kernel], added: dict[int, list[Kernel]]) -> None:
    """What loops stack their results in is set to zero before the first of them: all of one shape in one kernel."""
    shapes: dict[tuple[tuple[int, ...], str], Kernel] = {}
    for index, kernel in enumerate(kernels):
        if kernel.node.name != "scan":
            continue
        for value in kernel.node.outputs[kernel.node.carried :]:
            if value not in kernel.makes:
                continue
            key = (value.shape, value.dtype)
            if key not in shapes:
                shapes[key] = _kernel("broadcast_in_dim", kernel.node, [])
                added.setdefault(index, []).append(shapes[key])
            _started_by(shapes[key], kernel, value)


def _pooling(kernels: list[Kernel], added: dict[int, list[Kernel]]) -> None:
    """The gradient of max pooling is a search for each maximum, then a scatter into zeros.

    Where others read these zeros, too, it is into a copy of them.
    """
    for index, kernel in enumerate(kernels):
        if kernel.node.name != "select_and_scatter_add":
            continue
        gradient = kernel.node.inputs[0]
        # Of each window the maximum, and where it was, in 32-bit numbers.
        kernel.scratch = gradient.elements * (gradient.size // max(1, gradient.elements) + 4 * len(gradient.shape))
        for zeros in kernel.node.inputs[2:]:
            copying = _kernel("copy", kernel.node, [zeros])
            kernel.reads.remove(zeros)
            _started_by(copying, kernel, kernel.makes[0])
            added.setdefault(index, []).append(copying)


def _copies_across(kernels: list[Kernel], added: dict[int, list[Kernel]]) -> None:
    """The gradient of a transposed convolution's kernel reads images as channels: copies, made with the originals.

    Of what the program is given they are made just before.
    """
    makers = {id(value): kernel for kernel in kernels for value in kernel.makes}
    for index, kernel in enumerate(kernels):
        # With uneven padding a GPU has had them copied to be padded.
        if (conv := kernel.node.convolution) and conv.across and not (conv.uneven and kernel.node.workspace):
            for position, value in enumerate(kernel.reads):
                copy = Value(value.shape, value.dtype, value.size, value.node)
                if id(value) not in makers:
                    makers[id(value)] = _kernel("transpose", kernel.node, [value])
                    added.setdefault(index, []).append(makers[id(value)])
                makers[id(value)].makes.append(copy)
                kernel.reads[position] = copy


def _kernel(name: str, like: Node, reads: list[Value]) -> Kernel:
    return Kernel(Node(name, reads, [], like.scope), reads, [], [])


def _started_by(first: Kernel, kernel: Kernel, value: Value) -> None:
    """Gives a kernel an array that is ready to write a result into."""
    ready = Value(value.shape, value.dtype, value.size, first.node)
    first.makes.append(ready)
    kernel.reads.append(ready)
    kernel.in_place.append(ready)
