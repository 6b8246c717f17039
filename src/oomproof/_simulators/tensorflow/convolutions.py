"""What TensorFlow's convolutions take on a GPU besides their inputs and results, in graph mode.

TensorFlow copies the filter into the order cuDNN wants, pads the image where cuDNN cannot, which pads both sides
alike, and computes the gradient by the image in a place of its own. cuDNN's quick kernels want the channels last, and a
multiple of 16 bytes of them: where they come first, images are copied into what cuDNN works in. Which kernel is the
quickest, and whether it takes more, is only known on the card. Of single layers drawn at random nearly half took on an
H200 what this says to a tenth, some to the byte, and most others more (benchmarks/estimate/workspaces_graph.py).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from oomproof._simulators.tensorflow.graph import Node, TensorType

_FORWARD = ("Conv2D", "_FusedConv2D", "Conv3D")
_BY_IMAGE = ("Conv2DBackpropInput", "Conv3DBackpropInputV2")
_BY_FILTER = ("Conv2DBackpropFilter", "Conv3DBackpropFilterV2")
CONVOLUTIONS = frozenset((*_FORWARD, *_BY_IMAGE, *_BY_FILTER))
_ALIGNED = 16


def convolution_scratch(node: Node, inputs: Sequence[TensorType], outputs: Sequence[TensorType]) -> tuple[int, ...]:
    """Bytes of each allocation that a convolution, or one of its gradients, makes while it runs."""
    convolution = _read(node, inputs, outputs)
    if convolution is None or convolution.is_matrix_product:
        return ()
    place = convolution.padded if node.op in _BY_IMAGE or convolution.padded != convolution.image.size else 0
    return tuple(size for size in (convolution.filters.size, place, convolution.workspace) if size)


@dataclasses.dataclass(frozen=True, slots=True)
class _Convolution:
    """Image and filters, what they give, and how."""

    image: TensorType
    filters: TensorType
    result: TensorType
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    same: bool
    channels_last: bool

    @property
    def is_matrix_product(self) -> bool:
        """Whether TensorFlow leaves it to cuBLAS."""
        return self.channels_last and not self._has_windows

    @property
    def padded(self) -> int:
        """Bytes of the image with as much on either side."""
        sizes = self._spatial(self.image)
        reach = [(size - 1) * dilation + 1 for size, dilation in zip(self._window, self.dilations, strict=True)]
        more = [
            max(0, (positions - 1) * stride + window - size) % 2 if self.same else 0
            for positions, stride, window, size in zip(
                self._spatial(self.result), self.strides, reach, sizes, strict=True
            )
        ]
        grown = math.prod(size + extra for size, extra in zip(sizes, more, strict=True))
        return self.image.size * grown // max(1, math.prod(sizes))

    @property
    def workspace(self) -> int:
        """Bytes cuDNN is expected to work in."""
        if self.channels_last or not self._has_windows:
            return 0
        channels, filters = (shape[axis] for shape, axis in ((self.image.shape or (), 1), (self.result.shape or (), 1)))
        item = self.image.size // max(1, math.prod(self.image.shape or ()))
        if item * channels < _ALIGNED and item == 4:
            # Kernels for few channels read them as they are.
            return 0
        return _aligned(self.padded, channels, item) + _aligned(self.result.size, filters, item) + self.filters.size

    @property
    def _has_windows(self) -> bool:
        return {*self._window, *self.strides} != {1}

    @property
    def _window(self) -> tuple[int, ...]:
        return (self.filters.shape or ())[:-2]

    def _spatial(self, kind: TensorType) -> tuple[int, ...]:
        shape = kind.shape or ()
        return shape[1:-1] if self.channels_last else shape[2:]


def _read(node: Node, inputs: Sequence[TensorType], outputs: Sequence[TensorType]) -> _Convolution | None:
    if node.op in _FORWARD:
        image, filters, result = inputs[0], inputs[1], outputs[0]
    elif node.op in _BY_IMAGE:
        image, filters, result = outputs[0], inputs[1], inputs[2]
    else:
        image, filters, result = inputs[0], outputs[0], inputs[2]
    if not (image.known and filters.known and result.known):
        return None
    attributes = node.attributes
    last = attributes["data_format"].s.endswith(b"C")
    steps = [
        tuple(values[1:-1] if last else values[2:])
        for values in (attributes[name].list.i for name in ("strides", "dilations"))
    ]
    return _Convolution(image, filters, result, steps[0], steps[1], attributes["padding"].s == b"SAME", last)


def _aligned(size: int, channels: int, item: int) -> int:
    """Bytes of an image whose channels are filled up."""
    together = max(1, _ALIGNED // item)
    return size // max(1, channels) * (-(-channels // together) * together)
