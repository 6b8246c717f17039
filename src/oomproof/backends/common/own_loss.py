"""What a loss function of the user's own returns: a loss for each sample, or (sum, normaliser)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from keras import ops


def loss_of(loss_fn: Callable[..., Any], data: Any) -> Any:
    return loss_fn(*data) if isinstance(data, tuple) else loss_fn(data)


def sum_and_normaliser(result: Any) -> tuple[Any, Any]:
    if isinstance(result, tuple | list):
        if len(result) != 2:
            raise ValueError(
                "Expected `loss_fn` to return a loss per sample or (sum, normaliser). "
                f"Received: a {type(result).__name__} of {len(result)}"
            )
        total, normaliser = result
        return ops.sum(total), normaliser
    per_sample = ops.convert_to_tensor(result)
    if len(per_sample.shape) == 0:
        raise ValueError(
            "Expected `loss_fn` to return a loss for each sample, or (sum, normaliser). Received: a scalar. "
            "A mean cannot be put together from the means of pieces: return it before it is reduced."
        )
    # As many elements for each sample, so the number of elements is the normaliser of a mean.
    return ops.sum(per_sample), ops.size(per_sample)
