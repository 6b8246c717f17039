"""Bytes of a model and of what it makes, from shapes alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import keras
from keras import layers

from oomproof._backends.common.call_graph import graph_of, graphs
from oomproof._compat.names import is_kerass
from oomproof._records.units import DTYPE_BYTES, tensor_bytes

_ATTENTION = (layers.MultiHeadAttention, layers.GroupQueryAttention)


def bytes_of_outputs(model: Any, samples: int) -> int | None:
    """Bytes of everything the layers of a functional model make of a batch, or `None` where that is not known.

    What convolutions may take to work in counts, too: at most one is at work at a time, with both of its gradients.
    """
    total, found, workspace = 0, False, 0
    for graph in graphs(model):
        for call in graph.calls:
            found = True
            if _is_closed(call.operation):
                return None
            sizes = []
            for tensor in (*call.node.outputs, *call.node.input_tensors):
                shape = (samples, *tensor.shape[1:])
                if any(size is None for size in shape):
                    return None
                sizes.append(tensor_bytes(shape, str(tensor.dtype)))
            total += sum(sizes[: len(call.node.outputs)])
            if isinstance(call.operation, _ATTENTION):
                total += _of_attention(call.operation, samples, call.node.input_tensors)
            workspace = max(workspace, 2 * _kernel(call.operation) * max(sizes))
    return total + workspace if found else None


def largest_output(model: Any, samples: int) -> int:
    """Bytes of the largest tensor that a layer of a functional model makes of so many samples, as far as is known."""
    tensors = [tensor for graph in graphs(model) for call in graph.calls for tensor in call.node.outputs]
    shapes = [((samples, *tensor.shape[1:]), str(tensor.dtype)) for tensor in tensors]
    return max((tensor_bytes(shape, dtype) for shape, dtype in shapes if None not in shape), default=0)


def _kernel(operation: Any) -> int:
    """Numbers in a kernel, 0 where there is none. A layer has its size for each dimension, an operation as it came."""
    size = getattr(operation, "kernel_size", 0)
    return math.prod(size) if isinstance(size, (tuple, list)) else int(size or 0) ** 2


def _is_closed(operation: Any) -> bool:
    """Whether its results do not tell what it makes on the way: it has code of its own, or layers inside."""
    if not isinstance(operation, keras.Layer):
        return not is_kerass(type(operation))
    if graph_of(operation) is not None or isinstance(operation, _ATTENTION):
        return False
    if not is_kerass(type(operation)) or isinstance(operation, layers.Lambda):
        return True
    # A loop over time keeps what each of its rounds makes, and may return no more than the last.
    return isinstance(operation, layers.RNN) or bool(list(operation._flatten_layers(include_self=False)))


def _of_attention(layer: Any, samples: int, inputs: Sequence[Any]) -> int:
    """Bytes of queries, keys, values and what becomes of them, and of the scores: as they are, and as shares."""
    heads = getattr(layer, "num_heads", None) or layer.num_query_heads
    width = max(getattr(layer, "key_dim", None) or layer.head_dim, getattr(layer, "value_dim", None) or 0)
    queries, keys = (math.prod(tensor.shape[1:-1]) for tensor in (inputs[0], inputs[min(1, len(inputs) - 1)]))
    numbers = heads * (2 * queries * keys + 2 * width * (queries + keys))
    return int(samples * numbers * DTYPE_BYTES.get(str(layer.compute_dtype), 4))


def bytes_of_state(model: Any) -> int:
    """Bytes of weights and optimizer state."""
    slots = model.optimizer.variables if model.optimizer is not None else ()
    return sum(tensor_bytes(tuple(v.shape), str(v.dtype)) for v in [*model.variables, *slots])
