"""Memory that kernels take besides their results, which no fake tensor shows. Modelled, not measured.

Two kinds: what a kernel takes for as long as it runs, and what a library takes once and keeps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from oomproof._compat.torch_tracing import current_autograd_node
from oomproof._records.trace import Buffer, Target

_aten = torch.ops.aten
_MIB = 2**20
# torch gives cuBLAS its workspace from its own allocator, once for each handle. A handle belongs to a thread, and the
# backward pass has a thread of its own.
_CUBLAS = {False: 8 * _MIB + 128 * 2**10, True: 32 * _MIB}
_HOPPER = (9, 0)
_FLOAT = 4
_FEW_FILTERS = 3
_ALIGNED = 16
_MULTIPLIES = {_aten.mm, _aten.addmm, _aten.bmm, _aten.baddbmm, _aten.addmv, _aten.mv, _aten.dot}


class Workspaces:
    """Says how much an op takes besides its results on the target."""

    def __init__(self, target: Target) -> None:
        self._target = target
        # By which threads: whether that of the backward pass.
        self._multiplied: set[bool] = set()

    def __call__(self, func: Any, args: Any, results: Any) -> int:
        kind = func.overloadpacket
        if kind in _MULTIPLIES:
            self._multiplied.add(current_autograd_node() is not None)
        rule = (_ON_GPU if self._target.gpu else _ON_CPU).get(kind)
        return rule(args, results) if rule is not None else 0

    def lasting(self, ops: int) -> tuple[Buffer, ...]:
        """What libraries keep from the first step on."""
        if not self._target.gpu:
            return ()
        size = _CUBLAS[self._target.capability >= _HOPPER]
        return tuple(Buffer(size, -1, ops, "temporary", "") for _ in self._multiplied)


def _convolution(args: Any, results: Any) -> int:
    """cuDNN computes with channels last. Where they are not, it copies; weights are copied into that layout."""
    inputs, weights = args[0], args[1]
    return _bytes(weights) + _relaid(weights, inputs, results)


def _convolution_backward(args: Any, results: Any) -> int:
    """As forward. The gradient by the weights is summed up in single precision, in parts.

    For a few filters there are no kernels of their own: the input is copied once more, as seen on an H200
    (benchmarks/estimate/kernels.py), unless the kernel moves on by more than one.
    """
    gradient, inputs, weights, stride = args[0], args[1], args[2], args[4]
    few = gradient.shape[1] <= _FEW_FILTERS and weights.shape[2:].numel() > 1 and max(stride) == 1
    copied = _relaid(weights, gradient, inputs) + (_bytes(inputs) if few else 0)
    return _bytes(weights) + int(weights.numel()) * _FLOAT + copied


def _flash_backward(args: Any, results: Any) -> int:
    """The gradient by the queries is summed up in single precision, over lengths and heads rounded up."""
    batch, heads, length, size = args[1].shape
    rows = batch * heads * _rounded(length, 128)
    return int(rows * (_rounded(size, 32) + 1) * _FLOAT)


def _efficient_backward(args: Any, results: Any) -> int:
    """The gradient by the queries is summed up in single precision where it is not in that already."""
    query = args[1]
    rows = query.numel() // query.shape[-1]
    summed = query.numel() if query.element_size() < _FLOAT else 0
    return int(rows + summed) * _FLOAT


def _embedding_backward(args: Any, results: Any) -> int:
    """Indices are sorted: sorted ones, where they came from, and as much again to sort in."""
    return 4 * _bytes(args[1])


def _pooling_backward(args: Any, results: Any) -> int:
    """Gradient and indices are copied into the layout of the input where they are in another."""
    gradient, inputs, indices = args[0], args[1], args[-1]
    return _copies(_layout(inputs), gradient, indices)


def _pooling_backward_on_cpu(args: Any, results: Any) -> int:
    """There the gradient sets the layout."""
    return _copies(_layout(args[0]), results, args[-1])


def _copies(layout: torch.memory_format, *tensors: Any) -> int:
    return sum(_bytes(tensor) for tensor in tensors if not tensor.is_contiguous(memory_format=layout))


def _layout(tensor: Any) -> torch.memory_format:
    last = tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last)
    return torch.channels_last if last and not tensor.is_contiguous() else torch.contiguous_format


def _relaid(weights: Any, *tensors: Any) -> int:
    """Bytes of those that are not in the layout a convolution with these weights computes in."""
    if weights.dim() == 3:
        # There is no such layout in one dimension, so all are copied, except for what is a matrix product in truth.
        return sum(map(_bytes, tensors)) if weights.shape[-1] > 1 else 0
    layout = torch.channels_last if weights.dim() == 4 else torch.channels_last_3d
    copies = ((_filled(tensor), tensor.is_contiguous(memory_format=layout)) for tensor in tensors)
    return sum(size for (size, odd), fits in copies if odd or not fits)


def _filled(tensor: Any) -> tuple[int, bool]:
    """Bytes with so many channels that each place has a multiple of 16 bytes, as cuDNN reads them, and whether that is
    more."""
    channels = tensor.shape[1]
    filled = _rounded(channels, _ALIGNED // tensor.element_size())
    return _bytes(tensor) // channels * filled, filled > channels


def _bytes(tensor: Any) -> int:
    return int(tensor.numel() * tensor.element_size())


def _rounded(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


_Rules = dict[Any, Callable[[Any, Any], int]]
_ON_CPU: _Rules = {
    _aten.max_pool2d_with_indices_backward: _pooling_backward_on_cpu,
}
_ON_GPU: _Rules = {
    _aten.max_pool2d_with_indices_backward: _pooling_backward,
    _aten.convolution: _convolution,
    _aten.convolution_backward: _convolution_backward,
    _aten._scaled_dot_product_flash_attention_backward: _flash_backward,
    _aten._scaled_dot_product_efficient_attention_backward: _efficient_backward,
    _aten.embedding_dense_backward: _embedding_backward,
}
