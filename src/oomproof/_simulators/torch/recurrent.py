"""LSTM and GRU as cuDNN runs them: one kernel for all time steps, which keeps what goes back through them in one piece.

cuDNN does not say what that piece holds, nor what it works in. Both are as benchmarks/estimate/kernels.py saw them on
an H200, on 28 layers: the first to a tenth, the second to a half. And it wants time first, where Keras has it second,
so torch copies the inputs for each pass, and the gradient by the outputs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

# Values per time step and unit.
_KEPT = {"lstm": 5, "gru": 6}
# What each pass takes for as long as it runs: in half precision values per time step and unit, otherwise per time step,
# and in any case some bytes for each direction. A GRU of 512 units, seen later, took 13.1 values per step and unit.
_HALF_WORKSPACE = 6
_WORKSPACE, _WORKSPACE_OF_WIDE = 2450, 13.2
_WORKSPACE_BYTES = 8 * 2**20


def recurrent(kind: str) -> Callable[..., Any]:
    """A function with the arguments of torch's own `lstm` or `gru`."""

    def run(
        inputs: Any,
        state: Any,
        weights: Any,
        has_biases: bool,
        num_layers: int,
        dropout: float,
        training: bool,
        bidirectional: bool,
        batch_first: bool,
    ) -> Any:
        states = tuple(state) if isinstance(state, list | tuple) else (state,)
        keep = _KEPT[kind] if training and torch.is_grad_enabled() else 0
        return _Recurrent.apply(keep, 2 if bidirectional else 1, inputs, len(states), *states, *weights)

    return run


class _Recurrent(torch.autograd.Function):  # type: ignore[misc]
    """One layer, in one or both directions."""

    @staticmethod
    def forward(ctx: Any, keep: int, directions: int, inputs: Any, count: int, *rest: Any) -> Any:
        states, weights = rest[:count], rest[count:]
        batch, steps, units = inputs.shape[0], inputs.shape[1], states[0].shape[-1]
        # cuDNN wants all weights in one piece.
        packed = inputs.new_empty(sum(weight.numel() for weight in weights))
        outputs = inputs.new_empty((batch, steps, directions * units))
        lasts = tuple(torch.empty_like(state) for state in states)
        reserve = inputs.new_empty(keep * directions * batch * steps * units)
        ctx.save_for_backward(inputs, *states, *weights, outputs, packed, reserve)
        ctx.count = count
        half = inputs.dtype != torch.float32
        ctx.workspace = (
            _HALF_WORKSPACE * outputs.numel()
            if half
            else int(max(_WORKSPACE, _WORKSPACE_OF_WIDE * units) * batch * steps)
        )
        ctx.workspace += directions * _WORKSPACE_BYTES // inputs.element_size()
        _workspace = inputs.new_empty(ctx.workspace + inputs.numel())
        return (outputs, *lasts)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        inputs, *rest, outputs, packed, _reserve = ctx.saved_tensors
        # Made in one piece like the weights, then handed out part by part.
        flat = torch.empty_like(packed)
        _workspace = inputs.new_empty(ctx.workspace + inputs.numel() + outputs.numel())
        gradients = []
        offset = 0
        for place, tensor in enumerate(rest):
            if place < ctx.count:
                gradients.append(torch.empty_like(tensor))
            else:
                gradients.append(flat[offset : offset + tensor.numel()].view(tensor.shape))
                offset += tensor.numel()
        return (None, None, torch.empty_like(inputs), None, *gradients)
