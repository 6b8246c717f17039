"""Arrays that `fit` would copy whole, fed a batch at a time where the host has no room for the copies."""

from __future__ import annotations

from typing import Any

import numpy as np

from oomproof._machine import host
from oomproof._records.units import format_bytes
from oomproof.data.pipelines.arrays import audit_arrays, leaves, nbytes

# Copies that fill more than this share of what is free are not made.
_MOST = 0.9
# More are never made (float16 on JAX: three casts, each twice as large), so that mostly nothing has to be looked at.
_COPIES_AT_MOST = 8


def feed_in_slices(arguments: dict[str, Any]) -> str | None:
    """Puts a `Stream` in the place of arrays among the arguments of `fit`, where copies of them would not fit the host.

    Keras shuffles arrays by its own random numbers; a stream has an order of its own. So nothing is changed that fits.

    Returns:
        What was done, in words; `None` where nothing was.
    """
    given = tuple(arguments.get(name) for name in ("x", "y", "sample_weight"))
    free = host.available()
    if free is None or not _can_be_streamed(given, arguments):
        return None
    if _COPIES_AT_MOST * sum(nbytes(array) for array in leaves(given)) <= _MOST * free:
        return None
    batch_size = arguments.get("batch_size") or 32
    stages = {stage.name: stage.bytes or 0 for stage in audit_arrays(given, batch_size).stages}
    own = stages.pop("arrays")
    copies = sum(stages.values())
    if copies <= _MOST * free:
        return None
    # Not before it is needed: Keras is told about streams when they are loaded.
    from oomproof.data.sources.arrays import from_arrays

    shuffle = bool(arguments.get("shuffle", True))
    arguments["x"] = from_arrays(*given, batch_size=batch_size, shuffle=shuffle)
    for name in ("y", "sample_weight", "batch_size", "shuffle"):
        arguments.pop(name, None)
    order = ", shuffled in another order than Keras's" if shuffle else ""
    return (
        f"fit would copy your arrays ({format_bytes(own)}) and hold {format_bytes(copies)} more, but the host has "
        f"{format_bytes(free)} free: feeding them in slices{order}"
    )


def _can_be_streamed(given: tuple[Any, ...], arguments: dict[str, Any]) -> bool:
    if given[0] is None or (given[1] is None and given[2] is not None):
        return False
    if arguments.get("validation_split") or arguments.get("steps_per_epoch") or arguments.get("shuffle") == "batch":
        return False  # These are for arrays alone.
    arrays = list(leaves(given))
    return all(isinstance(array, np.ndarray) and array.ndim for array in arrays) and len({len(a) for a in arrays}) == 1
