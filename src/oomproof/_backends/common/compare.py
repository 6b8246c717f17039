"""Finding the layer that makes a micro-batched step differ: whose outputs differ though its inputs agree?"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
from keras import tree

from oomproof._backends.common.model import layers


@contextlib.contextmanager
def outputs_recorded(model: Any) -> Iterator[list[tuple[Any, list[Any], list[Any]]]]:
    """Collects (layer, inputs, outputs) of every layer call that holds no other layers, in order."""
    seen: list[tuple[Any, list[Any], list[Any]]] = []
    leaf_layers = [layer for layer in layers(model) if not layer._layers]

    def recording(layer: Any, inner: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            outputs = inner(*args, **kwargs)
            seen.append((layer, _arrays((args, kwargs)), _arrays(outputs)))
            return outputs

        return call

    originals = {id(layer): layer.__dict__.get("call") for layer in leaf_layers}
    for layer in leaf_layers:
        layer.__dict__["call"] = recording(layer, layer.call)
    try:
        yield seen
    finally:
        for layer in leaf_layers:
            layer.__dict__.pop("call", None)
            if originals[id(layer)] is not None:
                layer.__dict__["call"] = originals[id(layer)]


def _arrays(values: Any) -> list[Any]:
    tensors = [leaf for leaf in tree.flatten(values) if keras.ops.is_tensor(leaf)]
    return [keras.ops.convert_to_numpy(tensor) for tensor in tensors if tensor.dtype != "string"]


def culprits(whole: list[Any], pieces: list[list[Any]], tolerance: float) -> list[str]:
    """Layers whose outputs on pieces are not the pieces of their output on the whole batch.

    Only those whose inputs still agree: what comes after a culprit differs too, and is not to blame.
    """
    found = []
    for calls in zip(whole, *pieces, strict=False):
        layer = calls[0][0]
        if _agree([call[1] for call in calls], tolerance) and not _agree([call[2] for call in calls], tolerance):
            name = f"{type(layer).__name__} {layer.path or layer.name!r}"
            if name not in found:
                found.append(name)
    return found


def _agree(values: list[list[Any]], tolerance: float) -> bool:
    whole, *pieces = values
    for index, array in enumerate(whole):
        parts = [piece[index] for piece in pieces]
        if array.ndim == 0 or not np.issubdtype(array.dtype, np.floating):
            continue
        if sum(len(part) for part in parts) != len(array):
            # No batch dimension (a weight, a table): it must be the same in every piece.
            if any(part.shape != array.shape for part in parts):
                return False
            joined, array = np.stack(parts), np.stack([array] * len(parts))
        else:
            joined = np.concatenate(parts)
        scale = max(float(np.max(np.abs(array), initial=0.0)), 1e-12)
        if float(np.max(np.abs(joined - array), initial=0.0)) > tolerance * scale:
            return False
    return True
