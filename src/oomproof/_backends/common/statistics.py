"""BatchNorm under micro-batching: moving statistics that advance once per logical batch.

Each piece is normalised with its own statistics (that is what makes it inexact and a caveat). The moving
statistics need not suffer too: the mean and variance of the whole batch follow exactly from those of the pieces.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from keras import ops


@contextlib.contextmanager
def recorded(layers: Sequence[Any]) -> Iterator[list[tuple[Any, tuple[Any, Any, Any]]]]:
    """Collects (layer, sums) for every call of the layers, in order. The sums add up over pieces."""
    seen: list[tuple[Any, tuple[Any, Any, Any]]] = []
    # Taken relative to the moving mean, so that no digits cancel when the mean is far from zero.
    references = {id(layer): ops.copy(layer.moving_mean) for layer in layers}

    def recorder(layer: Any) -> Any:
        def moments(inputs: Any, mask: Any) -> Any:
            mean, variance = type(layer)._moments(layer, inputs, mask)
            # No gradient goes through what is recorded. On torch it would also hold the graph that it is held by.
            still = (ops.stop_gradient(mean), ops.stop_gradient(variance))
            shape = ops.shape(inputs)
            sizes = ops.convert_to_tensor([shape[axis] for axis in layer._reduction_axes], dtype="int32")
            count = ops.cast(ops.prod(sizes), inputs.dtype)
            if mask is not None:
                count = count * ops.mean(ops.cast(mask, inputs.dtype))
            offset = ops.reshape(still[0], (-1,)) - ops.cast(references[id(layer)], mean.dtype)
            square = ops.reshape(still[1], (-1,)) + ops.square(offset)
            seen.append((layer, (count, count * offset, count * square)))
            return mean, variance

        # Where a part of the model is computed twice, what it records has to be taken out and put back.
        moments.seen = seen  # type: ignore[attr-defined]
        return moments

    for layer in layers:
        layer.__dict__["_moments"] = recorder(layer)
    try:
        yield seen
    finally:
        for layer in layers:
            layer.__dict__.pop("_moments", None)


def advance(calls: Sequence[Any], sums: Sequence[Any]) -> None:
    """Advances the moving statistics as one call on the whole batch would have done.

    Args:
        calls: The layer of each recorded call, in order.
        sums: The sums over all pieces, three for each call.
    """
    references = {id(layer): ops.copy(layer.moving_mean) for layer in calls}
    for index, layer in enumerate(calls):
        count, offset_sum, square_sum = sums[3 * index : 3 * index + 3]
        offset = ops.divide_no_nan(offset_sum, count)
        mean = ops.cast(references[id(layer)], offset.dtype) + offset
        variance = ops.divide_no_nan(square_sum, count) - ops.square(offset)
        if getattr(layer, "renorm", False):
            layer._update_renorm_statistics(mean, variance)
            continue
        keep, add = layer.momentum, 1.0 - layer.momentum
        layer.moving_mean.assign(ops.cast(layer.moving_mean, mean.dtype) * keep + mean * add)
        layer.moving_variance.assign(ops.cast(layer.moving_variance, mean.dtype) * keep + variance * add)
