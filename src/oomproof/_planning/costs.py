"""About how long a call of a layer takes, from shapes alone.

Arithmetic and memory traffic of the call, at the rates of a usual card. Only ratios between calls count: they say what
computing a segment of the model a second time costs next to the rest of the step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import keras
from keras import layers

from oomproof._backends.common.call_graph import Call, graph_of, graphs
from oomproof._compat.keras import BaseConvTranspose, DotProductAttention, Einsum, Matmul
from oomproof._records.trace import Spec
from oomproof._records.units import DTYPE_BYTES, tensor_bytes

# Operations a second by bytes of a number, and bytes a second.
_RATES = {2: 60e12, 4: 15e12}
_BANDWIDTH = 700e9
_ATTENTION = (layers.MultiHeadAttention, layers.GroupQueryAttention)


def forward_cost(call: Call, batch_size: int) -> float:
    """Seconds of one call on a batch, as Keras's own record of it has the shapes. Sizes left open count as 1."""
    inputs, outputs = (
        [spec_of(tensor, batch_size) for tensor in tensors] for tensors in (call.node.input_tensors, call.node.outputs)
    )
    return cost_of(call.operation, inputs, outputs)


def spec_of(tensor: Any, batch_size: int) -> Spec:
    """A symbolic tensor with the batch size put in."""
    batch, *rest = tensor.shape or (1,)
    shape = (batch_size if batch is None else batch, *(1 if size is None else size for size in rest))
    return Spec(tuple(int(size) for size in shape), keras.backend.standardize_dtype(tensor.dtype))


def cost_of(operation: Any, inputs: Sequence[Spec], outputs: Sequence[Spec]) -> float:
    """Seconds of one call on tensors like these."""
    if isinstance(operation, keras.Model) and graph_of(operation) is not None and outputs:
        outermost = next(graphs(operation))
        return sum(forward_cost(call, outputs[0].shape[0]) for call in outermost.calls)
    item = min((DTYPE_BYTES.get(spec.dtype, 4) for spec in outputs), default=4)
    return flops(operation, inputs, outputs) / _RATES.get(item, _RATES[4]) + _traffic(operation, inputs, outputs)


def flops(operation: Any, inputs: Sequence[Spec], outputs: Sequence[Spec]) -> int:
    """Multiplications and additions of matrix products, convolutions and their like; 0 for what only moves numbers.

    A layer with layers inside is taken for the sum of them, each as if it were called on what the outer one is.
    """
    if not outputs or not inputs:
        return 0
    result = outputs[0].shape
    if isinstance(operation, Matmul):
        return 2 * math.prod(result) * inputs[0].shape[-1]
    if isinstance(operation, Einsum):
        return _einsum_flops(operation.subscripts, inputs)
    if isinstance(operation, DotProductAttention):
        batch, length, heads, width = inputs[0].shape
        return 4 * batch * heads * length * inputs[1].shape[1] * width
    if not isinstance(operation, keras.layers.Layer):
        return 0
    if isinstance(operation, layers.Attention | layers.AdditiveAttention):
        batch, length, width = inputs[0].shape
        return 4 * batch * length * inputs[-1].shape[1] * width
    if isinstance(operation, layers.Dot):
        return 2 * math.prod(result) * inputs[0].shape[-1]
    own = 0 if isinstance(operation, layers.Embedding) else _kernels(operation)
    total = 2 * own * _positions(operation, inputs[0].shape, result)
    if isinstance(operation, _ATTENTION):
        total += _scores_flops(operation, inputs)
    inner = operation._flatten_layers(include_self=False, recursive=False)
    if isinstance(operation, layers.RNN):
        # The cell has the kernels, and is called once for each position.
        cells = sum(_kernels(layer) for layer in operation.cell._flatten_layers())
        return int(2 * cells * _positions(operation, inputs[0].shape, result))
    return total + sum(flops(layer, inputs, outputs) for layer in inner)


def _kernels(layer: Any) -> int:
    """Elements of the layer's own weights that make matrix products: of two axes or more, and no bias of heads."""
    own = (*layer._trainable_variables, *layer._non_trainable_variables)
    return sum(math.prod(v.shape) for v in own if len(v.shape) > 1 and "bias" not in v.name)


def _positions(layer: Any, given: Sequence[int], result: Sequence[int]) -> int:
    """How often the kernels are applied."""
    if isinstance(layer, BaseConvTranspose):
        result = given
    if isinstance(layer, layers.EinsumDense):
        terms, _, made = layer.equation.replace("...", "").partition("->")
        read, _, kernel = terms.partition(",")
        sizes = dict(zip(kernel, layer.kernel.shape, strict=True))

        def without(shape: Sequence[int], axes: str) -> int:
            return math.prod(shape) // int(math.prod(size for axis, size in sizes.items() if axis in axes))

        # What goes in and what comes out, each without the kernel's axes. Inside of another layer one is that layer's.
        return max(1, without(given, read), without(result, made))
    if getattr(layer, "data_format", None) == "channels_first":
        return math.prod((result[0], *result[2:]))
    times = given[1] if isinstance(layer, layers.RNN) and not layer.return_sequences else 1
    return math.prod(result[:-1]) * times


def _scores_flops(layer: Any, inputs: Sequence[Spec]) -> int:
    """Every query with every key, and every score with every value."""
    if len(inputs[0].shape) < 3:
        return 0
    heads = getattr(layer, "num_heads", None) or layer.num_query_heads
    width = getattr(layer, "key_dim", None) or layer.head_dim
    batch, queries = inputs[0].shape[0], math.prod(inputs[0].shape[1:-1])
    keys = math.prod(inputs[min(1, len(inputs) - 1)].shape[1:-1])
    return int(4 * batch * heads * queries * keys * width)


def _einsum_flops(subscripts: str, inputs: Sequence[Spec]) -> int:
    terms = subscripts.partition("->")[0].split(",")
    if len(terms) < 2 or "." in subscripts:
        return 0
    sizes: dict[str, int] = {}
    for term, spec in zip(terms, inputs, strict=False):
        sizes.update(zip(term, spec.shape, strict=False))
    return 2 * math.prod(sizes.values())


def _traffic(operation: Any, inputs: Sequence[Spec], outputs: Sequence[Spec]) -> float:
    """Seconds to read what goes in and the weights, and to write what comes out."""
    result = sum(tensor_bytes(spec.shape, spec.dtype) for spec in outputs)
    moved = result + sum(tensor_bytes(spec.shape, spec.dtype) for spec in inputs)
    if isinstance(operation, keras.layers.Layer):
        moved += sum(tensor_bytes(tuple(weight.shape), weight.dtype) for weight in operation.weights)
        # What is between the layers inside is written and read, too.
        inner = operation._flatten_layers(include_self=False, recursive=True)
        moved += 2 * result * len([layer for layer in inner if layer.weights])
    return moved / _BANDWIDTH
