"""Updates of a few rows of a weight at a time, for optimizers that compute each number by itself.

What an optimizer computes in between is as large as the weight, several times over: an embedding of 250 MiB did not go
through Nadam's update with 900 MiB free.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import keras

from oomproof._compat.keras import standardize_dtype
from oomproof._compat.names import is_kerass
from oomproof._records.units import tensor_bytes

# Bytes of a weight that are updated together.
AT_ONCE = 8 * 2**20
# Keras's optimizers whose new values of a row depend on that row alone. Others take a norm, or a mean, of all of it.
_BY_ELEMENT = ("SGD", "Adam", "AdamW", "Adamax", "Adadelta", "Adagrad", "Nadam", "RMSprop", "Lion", "Ftrl")
# What an optimizer keeps for a weight and does not look at while it updates it.
_LEFT_ALONE = ("_trainable_variables", "_accumulated_gradients", "_model_variables_moving_average")
# What is alive at once while rows are updated, as a multiple of them; and while a weight is updated as a whole.
_WORK, _WORK_OF_WHOLE = 6, 8


def inner_of(optimizer: Any) -> Any:
    """The optimizer that makes updates, where another one wraps it."""
    return getattr(optimizer, "inner_optimizer", optimizer)


def goes_by_rows(optimizer: Any) -> bool:
    """Whether a weight may be updated a few rows at a time. A class of the user's own may do what it wants."""
    kind = type(inner_of(optimizer))
    return kind.__name__ in _BY_ELEMENT and is_kerass(kind)


def bounds(variable: Any) -> list[tuple[int, int]]:
    """Where the rows of a weight begin and end that are updated together."""
    shape = tuple(variable.shape)
    length = shape[0] if shape else 1
    size = tensor_bytes(shape, standardize_dtype(variable.dtype))
    rows = max(1, math.floor(length * AT_ONCE / max(size, 1)))
    return [(start, min(start + rows, length)) for start in range(0, length, rows)]


def work_of_update(optimizer: Any) -> int:
    """About how many bytes an update takes that is made a weight, or a few rows of it, at a time."""
    sizes = [tensor_bytes(tuple(v.shape), v.dtype) for v in inner_of(optimizer)._trainable_variables]
    largest = max(sizes, default=0)
    if not goes_by_rows(optimizer):
        return _WORK_OF_WHOLE * largest
    slots = len(slots_of(optimizer, sizes.index(largest))) if sizes else 0
    return (_WORK + slots) * min(largest, AT_ONCE)


def slots_of(optimizer: Any, index: int) -> dict[str, Any]:
    """What an optimizer keeps for the weight at this place, by the name of the list it is in."""
    inner = inner_of(optimizer)
    shape = tuple(inner._trainable_variables[index].shape)
    lists = {name: kept for name, kept in vars(inner).items() if isinstance(kept, list) and name not in _LEFT_ALONE}
    found = {name: kept[index] for name, kept in lists.items() if len(kept) > index}
    return {
        name: slot for name, slot in found.items() if isinstance(slot, keras.Variable) and tuple(slot.shape) == shape
    }


@contextlib.contextmanager
def standing_in(optimizer: Any, index: int, slots: dict[str, Any]) -> Iterator[None]:
    """While it lasts, the optimizer takes any weight for the one at this place, and has these slots for it."""
    kept = vars(inner_of(optimizer))  # Not through Keras's __setattr__, which would track what it is given.
    stand_ins: dict[str, Any] = {name: {index: slot} for name, slot in slots.items()}
    stand_ins["_get_variable_index"] = lambda variable: index
    before = {name: kept[name] for name in stand_ins if name in kept}
    kept.update(stand_ins)
    try:
        yield
    finally:
        for name in stand_ins:
            if name in before:
                kept[name] = before[name]
            else:
                kept.pop(name, None)
