"""Updates of a few rows of a weight at a time, for optimizers that compute each number by itself.

What an optimizer computes in between is as large as the weight, several times over: an embedding of 250 MiB did not go
through Nadam's update with 900 MiB free.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import keras

from oomproof._backends.common.engine import taken_back
from oomproof._compat.keras import standardize_dtype
from oomproof._compat.names import is_kerass
from oomproof._records.units import tensor_bytes

# Bytes of a weight that are updated together.
AT_ONCE = 8 * 2**20
# Kernels round what is left over at the end in another way, so rows come in multiples of what they take at once.
_ALIGNED = 64
# Keras's optimizers whose new values of a row depend on that row alone. Others take a norm, or a mean, of all of it.
_BY_ELEMENT = ("SGD", "Adam", "AdamW", "Adamax", "Adadelta", "Adagrad", "Nadam", "RMSprop", "Lion")
# What an optimizer keeps for a weight and does not look at while it updates it.
_LEFT_ALONE = ("_variables", "_trainable_variables", "_accumulated_gradients", "_model_variables_moving_average")
# What is put in the place of an optimizer's own methods meanwhile.
_OVERRIDDEN = ("update_step", "_backend_update_step", "_get_variable_index")
# What is alive at once while rows are updated, as a multiple of them; and while a weight is updated as a whole.
_WORK, _WORK_OF_WHOLE = 6, 8
# What averages and accumulators of a weight take, as a multiple of it.
_WORK_BESIDE = 3
# Slots of an optimizer that has none yet.
_SLOTS = 3


def inner_of(optimizer: Any) -> Any:
    """The optimizer that makes updates, where another one wraps it."""
    return getattr(optimizer, "inner_optimizer", optimizer)


def goes_by_rows(optimizer: Any) -> bool:
    """Whether a weight may be updated a few rows at a time. Code of the user's own may do what it wants."""
    inner = inner_of(optimizer)
    kind = type(inner)
    own = is_kerass(kind) and is_kerass(kind.update_step) and not any(name in vars(inner) for name in _OVERRIDDEN)
    return own and kind.__name__ in _BY_ELEMENT


def bounds(variable: Any) -> list[tuple[int, int]]:
    """Where the rows of a weight begin and end that are updated together."""
    shape = tuple(variable.shape)
    length = shape[0] if shape else 1
    rows = max(1, math.floor(length * AT_ONCE / max(_bytes_of(variable), 1)))
    rows = rows // _ALIGNED * _ALIGNED or rows
    return [(start, min(start + rows, length)) for start in range(0, length, rows)]


def work_of_update(model: Any) -> int:
    """About how many bytes an update takes that is made a weight, or a few rows of it, at a time."""
    optimizer, variables = model.optimizer, model.trainable_variables
    inner = inner_of(optimizer)
    sizes = [_bytes_of(variable) for variable in variables]
    largest = max(sizes, default=0)
    beside = 0
    if inner is not optimizer or inner.loss_scale_factor or inner.clipnorm or inner.global_clipnorm or inner.clipvalue:
        beside += sum(sizes) + largest  # Another set of gradients.
    if inner.use_ema or inner.gradient_accumulation_steps:
        beside += _WORK_BESIDE * largest
    if not goes_by_rows(optimizer):
        return beside + _WORK_OF_WHOLE * largest
    parts = max((math.ceil(size / len(bounds(v))) for size, v in zip(sizes, variables, strict=True) if size), default=0)
    slots = len(slots_of(optimizer, 0)) if inner.built and variables else _SLOTS
    return beside + (_WORK + slots) * parts


def _bytes_of(variable: Any) -> int:
    return tensor_bytes(tuple(variable.shape), standardize_dtype(variable.dtype))


def slots_of(optimizer: Any, index: int) -> dict[str, Any]:
    """What an optimizer keeps for the weight at this place, by the name of the list it is in."""
    inner = inner_of(optimizer)
    shape = tuple(inner._trainable_variables[index].shape)
    found = {name: kept[index] for name, kept in _lists(inner).items() if len(kept) > index}
    return {
        name: slot for name, slot in found.items() if isinstance(slot, keras.Variable) and tuple(slot.shape) == shape
    }


def _lists(inner: Any) -> dict[str, Any]:
    return {name: kept for name, kept in vars(inner).items() if isinstance(kept, list) and name not in _LEFT_ALONE}


@contextlib.contextmanager
def put_back_at_the_end(optimizer: Any) -> Iterator[Callable[[], None]]:
    """Yields what takes out of the optimizer again what was put into it. It is done at the end whatever happens."""
    kept = vars(inner_of(optimizer))  # Not through Keras's __setattr__, which would track what it is given.
    names = (*_OVERRIDDEN, *_lists(inner_of(optimizer)))
    before = {name: kept[name] for name in names if name in kept}

    def put_back() -> None:
        for name in names:
            if name in before:
                kept[name] = before[name]
            else:
                kept.pop(name, None)

    with taken_back(put_back):
        yield put_back


def stand_in(optimizer: Any, index: int, slots: dict[str, Any]) -> None:
    """From here on the optimizer takes any weight for the one at this place, and has these slots for it."""
    kept = vars(inner_of(optimizer))
    kept.update({name: {index: slot} for name, slot in slots.items()})
    kept["_get_variable_index"] = lambda variable: index
