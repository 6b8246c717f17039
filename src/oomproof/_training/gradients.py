"""Exact full-batch gradients in pieces, for people with their own training loop or train_step."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from oomproof import _backends as backends
from oomproof._backends.base import DeviceMemory, Shortage
from oomproof._backends.common.own_arguments import check_data, checked_variables
from oomproof._backends.pieces import checked_size, largest_piece, piece_count
from oomproof._records.units import format_bytes
from oomproof._training import messages, piece_sizes
from oomproof._training.piece_sizes import Evidence

logger = logging.getLogger("oomproof")


class _LastSizes:
    """The piece size that worked last, by the code of the loss function: a lambda is a new object in every step."""

    def __init__(self) -> None:
        self._sizes: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._lock = threading.Lock()

    def get(self, loss_fn: Callable[..., Any]) -> int | None:
        with self._lock:
            return self._sizes.get(_code_of(loss_fn))

    def keep(self, loss_fn: Callable[..., Any], size: int) -> None:
        with self._lock:
            self._sizes[_code_of(loss_fn)] = size


_last_sizes = _LastSizes()


def gradients(
    loss_fn: Callable[..., Any],
    variables: Sequence[Any],
    data: Any,
    *,
    micro_batch_size: int | str = "auto",
    has_aux: bool = False,
) -> tuple[Any, list[Any]]:
    """Computes the loss and the gradients of a full batch, in pieces that fit.

    The loss is `sum / normaliser` over the whole batch, not the mean of the means of its pieces, so masks, weights and
    a short last piece come out right. After an out-of-memory error the batch runs again in smaller pieces. Nothing has
    been written by then.

    Args:
        loss_fn: The loss of a piece, called as `loss_fn(*data)` if `data` is a tuple and as `loss_fn(data)` otherwise.
            Returns the loss of each sample (any shape with samples first; their mean is the loss), or two scalars
            `(sum, normaliser)`. Decorate it with `@tf.function` or `@jax.jit` to compile it.
        variables: What to differentiate by.
        data: Tensors or arrays with samples along their first dimension, in any nesting.
        micro_batch_size: The most samples to run at a time. `"auto"` runs the batch whole, and in pieces after an
            out-of-memory error. Inside a compiled function errors cannot be caught, so a number is needed there.
        has_aux: Whether `loss_fn` returns `(loss, aux)`, with `aux` anything nested that has a row for each sample,
            such as predictions. Those of all pieces are concatenated.

    Returns:
        `(loss, gradients)`, with the gradients in the order of `variables` and `None` where there is none. With
        `has_aux`, `((loss, aux), gradients)`.

    Raises:
        RecoveryFailedError: If not even one sample at a time fits.
        TypeError: If an argument, or what `loss_fn` returns, is of the wrong type.
        ValueError: If an argument is out of range, or what `loss_fn` returns does not have a row for each sample.

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

    def compute(size: int | None) -> tuple[Any, list[Any]]:
        result, found = backend.gradients(loss_fn, variables, data, size, has_aux)
        return result, found

    if backend.inside_graph():
        if size is None:
            raise ValueError(
                'micro_batch_size="auto" catches out-of-memory errors, which cannot be done inside a compiled '
                "function. Expected an int there, such as micro_batch_size=32; or call `oomproof.gradients` outside "
                "of it."
            )
        return compute(size)
    size = size or _last_sizes.get(loss_fn)
    return _recovering(compute, size, backend.samples_in(data), backend.memory(), loss_fn)


def _recovering(
    compute: Callable[[int | None], tuple[Any, list[Any]]],
    size: int | None,
    batch_size: int,
    memory: DeviceMemory,
    loss_fn: Callable[..., Any],
) -> tuple[Any, list[Any]]:
    """Computes in pieces of at most `size` samples, and of fewer until they fit."""
    evidence = Evidence()
    while True:
        try:
            return compute(size)
        except Exception as error:
            shortage = memory.shortage(error)
            if shortage is None:
                raise
        # Here the except block is left and its frames are gone, so memory can come back.
        memory.release()
        failed = largest_piece(batch_size, piece_count(batch_size, size))
        free = _free(memory)
        evidence = evidence.with_failure(failed, free)
        size = _next_size(evidence, failed, free, memory, shortage)
        _last_sizes.keep(loss_fn, size)
        pieces = piece_count(batch_size, size)
        room = "" if free is None else f", {format_bytes(free)} free"
        logger.warning(
            f"oomproof: batch {batch_size} now runs as {pieces} × {largest_piece(batch_size, pieces)}: "
            f"ran out of memory at {failed}{room}; nothing lost"
        )


def _next_size(evidence: Evidence, failed: int, free: int | None, memory: DeviceMemory, shortage: Shortage) -> int:
    size = piece_sizes.smaller(evidence, failed, free)
    if size is None:
        raise messages.gradient_does_not_fit(memory.describe(), shortage) from shortage.error
    return size


def _free(memory: DeviceMemory) -> int | None:
    use, limit = memory.usage(), memory.describe().limit
    return limit - use.current if use is not None and limit is not None else None


def _code_of(loss_fn: Callable[..., Any]) -> Any:
    function = getattr(loss_fn, "python_function", loss_fn)
    return getattr(function, "__code__", function)
