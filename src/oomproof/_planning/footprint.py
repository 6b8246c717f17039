"""Bytes of a model and of what it makes, from shapes alone."""

from __future__ import annotations

from typing import Any

import keras

from oomproof._backends.common.call_graph import graphs
from oomproof._records.units import tensor_bytes


def bytes_of_outputs(model: Any, samples: int) -> int | None:
    """Bytes of everything the layers of a functional model make of a batch, or `None` where that is not known."""
    total, found = 0, False
    # A loop over time keeps what each of its rounds makes, and may return no more than the last.
    if any(isinstance(layer, keras.layers.RNN) for layer in model._flatten_layers()):
        return None
    for graph in graphs(model):
        for call in graph.calls:
            for tensor in call.node.outputs:
                found = True
                shape = [samples, *tensor.shape[1:]]
                if any(size is None for size in shape):
                    return None
                total += tensor_bytes(tuple(shape), str(tensor.dtype))
    return total if found else None


def bytes_of_state(model: Any) -> int:
    """Bytes of weights and optimizer state."""
    slots = model.optimizer.variables if model.optimizer is not None else ()
    return sum(tensor_bytes(tuple(v.shape), str(v.dtype)) for v in [*model.variables, *slots])
