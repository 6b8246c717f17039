"""What a batch holds: tensors of some structure, and none where nothing was given."""

from __future__ import annotations

from typing import Any

import keras
from keras import tree

from oomproof._compat.keras import standardize_dtype


def batch_leaves(data: Any) -> list[Any]:
    """The tensors of a batch."""
    return [leaf for leaf in tree.flatten(data) if leaf is not None]


def symbolic(leaf: Any) -> Any:
    """What stands for a tensor of a batch of any size while Keras builds a model."""
    if leaf is None:
        return None
    shape = tuple(leaf.shape)
    return keras.KerasTensor((None, *shape[1:]) if shape else shape, standardize_dtype(leaf.dtype))
