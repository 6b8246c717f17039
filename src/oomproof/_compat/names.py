"""Names that are only compared or printed. Nothing is imported for them."""

from __future__ import annotations

from typing import Any

# The class that every tf.data pipeline is of, as `type.__module__` and `type.__qualname__` give it.
TF_DATASET = "tensorflow.python.data.ops.dataset_ops.DatasetV2"


def is_kerass(thing: Any) -> bool:
    """Whether a class or a function is Keras's own."""
    return str(getattr(thing, "__module__", "")).startswith("keras.src.")
