"""What XLA and cuDNN need for a convolution besides its operands and its result.

XLA hands convolutions to cuDNN, which pads alike on both sides: where a model does not, XLA makes a padded copy first
(or, for gradients by the input, cuts a larger result, which is not counted). The autotuner then takes the quickest of
cuDNN's algorithms, whatever room it wants to work in. Which one that is cannot be known without the card. The rules for
it are from single layers on an H200 (benchmarks/estimate/kernels.py).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable
from typing import Literal

from oomproof._simulators.xla.program import Convolution, Node, Sizes, Value

Role = Literal["forward", "by input", "by kernel"]

# Gradients by kernels are summed up in parts: about as much, whatever the layer.
_PARTS = 4 << 20
# Channels that tensor cores work on at a time, in half precision. Others are copied, filled up to as many.
_ALIGNED = 8
# In float32 arrays are copied in another order where there are so few channels, or no more than that on both sides, or
# the window is that large; with strides not where it is that small.
_FEW, _SOME, _LARGE_WINDOW, _SMALL_WINDOW = 24, 32, 7, 3
# The largest image cuDNN computes by Fourier transforms, and more room than was seen to be given for it (10.9 GB).
_FFT_SIZE = 256
_FFT_MOST = 12 << 30


def for_cudnn(nodes: Iterable[Node], *, shared: bool = True) -> list[Node]:
    """The operations as they run on a GPU: padded copies before convolutions, and what cuDNN works in.

    Args:
        nodes: The program, in its order.
        shared: Whether all that read an array padded in one way read the same copy, as in one compiled program.
    """
    made: dict[tuple[object, ...], Value] = {}
    ordered: list[Node] = []
    for node in nodes:
        conv = node.convolution
        if conv is not None and len(node.inputs) == 2:
            kind = role(node, conv)
            if conv.uneven and kind != "by input":
                conv = _padded(conv)
                for position, shape in enumerate(conv.shapes[:2]):
                    source = node.inputs[position]
                    if (elements := math.prod(shape)) == source.elements:
                        continue
                    # What is read with images as channels is written in that order, for this one alone.
                    key = (id(source), shape, id(node) if conv.across or not shared else None)
                    if key not in made:
                        pad = Node("pad", [source], [], node.scope)
                        made[key] = Value(shape, source.dtype, elements * _width(source), pad)
                        pad.outputs.append(made[key])
                        ordered.append(pad)
                    node.inputs[position] = made[key]
            node.workspace = workspace(conv, kind, _width(node.inputs[0]))
        ordered.append(node)
    return ordered


def _width(value: Value) -> int:
    return value.size // max(1, value.elements)


def _padded(conv: Convolution) -> Convolution:
    """With the operands that are copied as large as their copies, with zeros around and between their elements."""
    first, second, result = conv.shapes
    if not conv.across:
        first = _resized(first, conv.first, lambda n, axis: n + max(0, sum(conv.padding[axis])))
    else:
        window = _inner(result, conv.result)
        first = _resized(first, conv.first, lambda n, axis: (n - 1) * conv.holes[axis] + 1)
        spread = _inner(first, conv.first)
        second = _resized(second, conv.second, lambda _, axis: spread[axis] + window[axis] - 1)
    return dataclasses.replace(conv, shapes=(first, second, result))


def _inner(shape: Sizes, outer: tuple[int, int]) -> Sizes:
    """The height and width in a shape."""
    return tuple(n for axis, n in enumerate(shape) if axis not in outer)


def _resized(shape: Sizes, outer: tuple[int, int], size: Callable[[int, int], int]) -> Sizes:
    axes = [axis for axis in range(len(shape)) if axis not in outer]
    return tuple(size(n, axes.index(axis)) if axis in axes else n for axis, n in enumerate(shape))


def role(node: Node, conv: Convolution) -> Role:
    if conv.first[0] != 0:
        return "by kernel"
    strided, spread = (max(sizes, default=1) > 1 for sizes in (conv.strides, conv.holes))
    return "by input" if spread or (not strided and _is_reversed(node.inputs[1])) else "forward"


def _is_reversed(kernel: Value) -> bool:
    count, node = 0, kernel.node
    while node is not None and node.name in ("rev", "transpose", "convert_element_type"):
        count += node.name == "rev"
        node = node.inputs[0].node if node.inputs else None
    return count % 2 == 1


def workspace(conv: Convolution, kind: Role, width: int) -> int:
    """Bytes that cuDNN is expected to work in.

    Args:
        conv: The convolution, with operands as cuDNN is given them.
        kind: Which of the three convolutions of a layer it is.
        width: Bytes of an element.
    """
    if conv.grouped or not conv.strides:
        return 0
    by_kernel = kind == "by kernel"
    first, second, result = conv.shapes
    channels, filters = first[conv.first[0 if by_kernel else 1]], second[conv.second[0]]
    large = [(width * math.prod(first), channels), (width * math.prod(second if by_kernel else result), filters)]
    copies = sum(size for size, _ in large)
    window = _inner(result, conv.result) if by_kernel else _inner(second, conv.second)
    if max(window + conv.strides + conv.holes + conv.window_holes) == 1:
        # A matrix product.
        return 0
    if len(conv.strides) == 3:
        # XLA has the channels first, cuDNN wants them last.
        return sum(_filled_up(*each) for each in large) if width < 4 else copies
    if width < 4:
        loose = sum(_filled_up(size, count) for size, count in large if count % _ALIGNED)
        return loose + _PARTS if by_kernel else loose if kind == "by input" else 0
    if not by_kernel:
        return 0
    if conv.across and conv.uneven:
        return _by_fourier(conv, copies)
    if conv.across or max(conv.strides) > 1:
        # Of a transposed convolution with strides, or one whose window has holes.
        return copies
    usual = _SMALL_WINDOW if max(conv.window_holes) > 1 else 1
    few = 1 < channels <= _FEW or max(channels, filters) <= _SOME or min(window) >= _LARGE_WINDOW
    return copies if len(conv.strides) == 2 and min(window) > usual and few else _PARTS


def _filled_up(size: int, channels: int) -> int:
    """Bytes of a copy whose channels are filled up to as many as tensor cores work on at a time."""
    return size // max(1, channels) * (-(-channels // _ALIGNED) * _ALIGNED)


def _by_fourier(conv: Convolution, copies: int) -> int:
    """What cuDNN takes to convolve by Fourier transforms in float32, to the byte; else copies in another order.

    The images are those of the second operand, and the window is the first.
    """
    first, second, result = conv.shapes
    sizes = _inner(second, conv.second)
    size = max(sizes)
    # Seen with square images alone.
    if len(sizes) != 2 or min(sizes) == 1 or size > _FFT_SIZE:
        return copies
    side = 1 << (size - 1).bit_length()
    transformed = 8 * side * (side // 2 + 1)
    outer = ((second, conv.second), (first, conv.first), (result, conv.result))
    images, windows, results = (shape[one] * shape[other] for shape, (one, other) in outer)
    taken = copies + 4 * (math.prod(first) + math.prod(result)) + 2 * transformed * max(images + windows, results)
    return taken if taken <= _FFT_MOST else copies
