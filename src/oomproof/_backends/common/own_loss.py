"""What a loss function of the user's own returns: a loss for each sample, or (sum, normaliser), and what it adds."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

from keras import ops, tree

from oomproof._backends.common.model import overwritten
from oomproof.errors import UnsupportedModelError

_LOSS = "Expected `loss_fn` to return a loss for each sample, or (sum, normaliser) as two scalars."
_AUX = (
    "Expected what `loss_fn` returns beside the loss to have a row for each sample, so that those of pieces can be put "
    "one behind the other."
)


@dataclasses.dataclass
class OwnLoss:
    """What the loss function says of a piece.

    Attributes:
        total: Sum of the losses.
        normaliser: What the sums of all pieces are divided by, once they are added up.
        rows: The tensors of the auxiliary outputs, each with a row for every sample.
        packed: Makes auxiliary outputs of such tensors again. It holds none itself.
    """

    total: Any
    normaliser: Any
    rows: list[Any]
    packed: Callable[[list[Any]], Any]


def own_loss(loss_fn: Callable[..., Any], data: Any, samples: int | None, has_aux: bool) -> OwnLoss:
    """Calls the loss function with a piece of the data.

    Args:
        loss_fn: The user's.
        data: The piece.
        samples: How many there are in it, `None` where that is not known while tracing.
        has_aux: Whether it returns (loss, auxiliary outputs).
    """
    result = loss_of(loss_fn, data)
    if not has_aux:
        return OwnLoss(*sum_and_normaliser(result, samples), [], lambda rows: None)
    if not isinstance(result, tuple | list) or len(result) != 2:
        raise ValueError(
            "Expected `loss_fn` to return (loss, auxiliary outputs), because of has_aux=True. "
            f"Received: {_described(result)}"
        )
    loss, aux = result
    return OwnLoss(*sum_and_normaliser(loss, samples), *_rows_of(aux, samples))


def check_have_gradients(variables: Sequence[Any]) -> None:
    """Raises UnsupportedModelError for variables whose "gradient" is their new value: no mean of it can be taken."""
    if found := overwritten(variables):
        names = ", ".join(variables[index].path for index in sorted(found)[:3])
        raise UnsupportedModelError(
            f"{len(found)} variables of float8 layers ({names}, …) take their new values from the backward pass of a "
            "finished loss. `oomproof.gradients` divides by the normaliser afterwards, so they would come out wrong. "
            "Train this model with `fit` and `oomproof.guard`, or without float8."
        )


def loss_of(loss_fn: Callable[..., Any], data: Any) -> Any:
    return loss_fn(*data) if isinstance(data, tuple) else loss_fn(data)


def sum_and_normaliser(result: Any, samples: int | None) -> tuple[Any, Any]:
    if isinstance(result, tuple | list):
        return _checked_pair(result)
    per_sample = _as_tensor(result, _LOSS)
    shape = _shape(per_sample)
    if shape == ():
        raise ValueError(
            f"{_LOSS} Received: a scalar. A mean cannot be put together from the means of pieces: return it before it "
            "is reduced."
        )
    known = [size for size in shape or (None,) if size is not None]
    # Losses of each sample are as many for every one of them, and more for more samples.
    if shape is not None and len(known) == len(shape) and (samples is None or math.prod(known) % samples):
        raise ValueError(f"{_LOSS} Received: shape {shape} for {_counted(samples)}")
    return ops.sum(per_sample), ops.size(per_sample)


def _checked_pair(result: Any) -> tuple[Any, Any]:
    hint = "For outputs beside the loss return (loss, outputs) and pass has_aux=True."
    if len(result) != 2:
        raise ValueError(f"{_LOSS} Received: a {type(result).__name__} of {len(result)}. {hint}")
    total, normaliser = (_as_tensor(part, _LOSS) for part in result)
    if _shape(total) not in ((), None) or _shape(normaliser) not in ((), None):
        raise ValueError(f"{_LOSS} Received: a pair of shapes {_shape(total)} and {_shape(normaliser)}. {hint}")
    return total, normaliser


def _rows_of(aux: Any, samples: int | None) -> tuple[list[Any], Callable[[list[Any]], Any]]:
    leaves = tree.flatten(aux)
    rows = [_with_rows(leaf, samples) for leaf in leaves if leaf is not None]
    there = tree.map_structure(lambda leaf: leaf is not None, aux)

    def packed(rows: list[Any]) -> Any:
        remaining = iter(rows)
        return tree.map_structure(lambda is_there: next(remaining) if is_there else None, there)

    return rows, packed


def _with_rows(leaf: Any, samples: int | None) -> Any:
    tensor = _as_tensor(leaf, _AUX)
    shape = _shape(tensor)
    # A size that is known where that of the piece is not has nothing to do with its samples.
    if not shape or (samples is None and shape[0] is not None) or shape[0] not in (samples, None):
        raise ValueError(
            f"{_AUX} Received: {'an unknown shape' if shape is None else f'shape {shape}'} for "
            f"{_counted(samples)}. Return it before it is reduced."
        )
    return ops.stop_gradient(tensor)


def _as_tensor(value: Any, expected: str) -> Any:
    if ops.is_tensor(value):
        return value
    if value is None or isinstance(value, str | dict):
        raise TypeError(f"{expected} Received: {_described(value)}")
    try:
        return ops.convert_to_tensor(value)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{expected} Received: {_described(value)}") from error


def _shape(tensor: Any) -> tuple[int | None, ...] | None:
    """`None` where not even the number of dimensions is known while tracing."""
    return None if getattr(tensor.shape, "rank", 0) is None else tuple(tensor.shape)


def _counted(samples: int | None) -> str:
    return "any number of samples" if samples is None else f"{samples} sample{'s' if samples > 1 else ''}"


def _described(value: Any) -> str:
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {len(value)}"
    return "None" if value is None else f"a {type(value).__name__}"
