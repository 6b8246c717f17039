"""Exact full-batch gradients in pieces, for people with their own training loop or train_step."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from oomproof import _backends as backends
from oomproof._backends.common.own_arguments import check_data, checked_variables
from oomproof._backends.pieces import checked_size, largest_piece, piece_count
from oomproof._explain.api import explain
from oomproof._records.units import format_bytes
from oomproof._training import recover
from oomproof._training.recover import Evidence
from oomproof.errors import RecoveryFailedError

logger = logging.getLogger("oomproof")

# The size that worked last, by the code of the loss function: a lambda is a new object in every step.
_sizes: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()


def gradients(
    loss_fn: Callable[..., Any],
    variables: Sequence[Any],
    data: Any,
    *,
    micro_batch_size: int | str = "auto",
    has_aux: bool = False,
) -> tuple[Any, list[Any]]:
    """Loss and gradients of the full batch, computed in pieces that fit.

    The loss is `sum / normaliser` over the whole batch, not the mean of the means of its pieces, so masks, weights
    and a short last piece come out right. An out-of-memory error makes the pieces smaller and runs the batch
    again; nothing has been written by then.

    Args:
        loss_fn: Called as `loss_fn(*data)` when `data` is a tuple and as `loss_fn(data)` otherwise, with a piece
            of it. Returns the loss of each sample (any shape with samples first; their mean is the loss), or
            `(sum, normaliser)`, two scalars. Decorate it with `@tf.function` to have it compiled.
        variables: What to differentiate by.
        data: Tensors or arrays with samples along their first dimension, in any nesting.
        micro_batch_size: Samples at a time, or `"auto"`: whole, and smaller after an out-of-memory error.
            Inside of a `tf.function` errors cannot be caught, so there it must be a number.
        has_aux: Whether `loss_fn` returns `(loss, aux)`, where `aux` is anything nested that has a row for each
            sample, such as predictions. Those of pieces are put one behind the other.

    Returns:
        `(loss, gradients)`, the gradients in the order of `variables`, `None` where there is none; with `has_aux`
        `((loss, aux), gradients)`.

    Raises:
        TypeError, ValueError: Something else was passed or returned than is expected. It says what.
        RecoveryFailedError: One sample at a time does not fit.

    Example:

    ```python
    def loss_fn(x, y):
        return keras.losses.sparse_categorical_crossentropy(y, model(x, training=True))

    loss, grads = oomproof.gradients(loss_fn, model.trainable_variables, (x, y))
    optimizer.apply(grads, model.trainable_variables)
    ```
    """
    backend = backends.current(trains=True)
    size = checked_size(micro_batch_size)
    variables = checked_variables(loss_fn, variables, backend.own_variables)
    check_data(data)
    if backend.inside_graph():
        if size is None:
            raise ValueError(
                'micro_batch_size="auto" needs to catch out-of-memory errors, which cannot be done inside of a '
                "compiled function. Expected an int there, such as micro_batch_size=32; or call "
                "`oomproof.gradients` outside of it."
            )
        result, found = backend.gradients(loss_fn, variables, data, size, has_aux)
        return result, found
    batch_size = backend.samples_in(data)
    size = size or _sizes.get(_code_of(loss_fn))
    memory = backend.memory()
    evidence = Evidence()
    while True:
        shortage = None
        try:
            result, found = backend.gradients(loss_fn, variables, data, size, has_aux)
            return result, found
        except Exception as error:
            shortage = memory.shortage(error)
            if shortage is None:
                raise
        memory.release()
        failed = largest_piece(batch_size, piece_count(batch_size, size))
        use, limit = memory.usage(), memory.describe().limit
        free = limit - use.current if use is not None and limit is not None else None
        evidence = evidence.with_failure(failed, free)
        size = recover.smaller(evidence, failed, free)
        if size is None:
            raise RecoveryFailedError(
                f"The gradient of one sample does not fit on {memory.describe()}. Nothing was written. Make the inputs "
                f"or the model smaller, or use a device with more memory. The framework said: {shortage.text}",
                diagnosis=explain(shortage.error),
            ) from shortage.error
        _sizes[_code_of(loss_fn)] = size
        pieces = piece_count(batch_size, size)
        room = "" if free is None else f", {format_bytes(free)} free"
        logger.warning(
            f"oomproof: batch {batch_size} now runs as {pieces} × {largest_piece(batch_size, pieces)}: "
            f"ran out of memory at {failed}{room}; nothing lost"
        )


def _code_of(loss_fn: Callable[..., Any]) -> Any:
    function = getattr(loss_fn, "python_function", loss_fn)
    return getattr(function, "__code__", function)
