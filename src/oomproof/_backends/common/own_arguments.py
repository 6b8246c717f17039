"""What is handed to `oomproof.gradients`. What cannot be right is refused, in words that say what to pass."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import keras
from keras import tree

_DATA = "Expected `data` to be tensors or arrays with samples along their first dimension, in any nesting."


def checked_variables(loss_fn: Any, variables: Any, own_kinds: tuple[type, ...]) -> list[Any]:
    """The variables as a list, once it is sure that they are some and that there is a function beside them.

    Args:
        loss_fn: What the user gave for it.
        variables: What the user gave for them.
        own_kinds: What the framework itself has for variables.
    """
    if not callable(loss_fn) and callable(variables):
        raise TypeError(
            "Expected `gradients(loss_fn, variables, data)`. Received: the function as the second argument and "
            f"`loss_fn` of type {type(loss_fn).__name__}"
        )
    if not callable(loss_fn) or isinstance(loss_fn, keras.Model):
        raise TypeError(
            "Expected `loss_fn` to be a function that takes a piece of the data and returns the loss of each sample, "
            "such as `lambda x, y: keras.losses.mean_squared_error(y, model(x))`. "
            f"Received: loss_fn of type {type(loss_fn).__name__}"
        )
    if isinstance(variables, keras.Layer):
        raise TypeError(
            "Expected `variables` to be a list of variables, such as `model.trainable_variables`. "
            f"Received: the {type(variables).__name__} itself"
        )
    kinds = (keras.Variable, *own_kinds)
    if isinstance(variables, (*kinds, str, dict)) or not isinstance(variables, Iterable):
        raise TypeError(
            "Expected `variables` to be a list of variables, such as `model.trainable_variables`. "
            f"Received: variables of type {type(variables).__name__}"
        )
    found = list(variables)
    if not found:
        raise ValueError(
            "Expected `variables` to hold at least one variable. Received: none. A model that is not built yet, or of "
            "which every layer is frozen, has no trainable variables."
        )
    for index, variable in enumerate(found):
        if not isinstance(variable, kinds):
            raise TypeError(
                "Expected `variables` to hold nothing but variables, such as `model.trainable_variables` does. "
                f"Received: variables[{index}] of type {type(variable).__name__}"
            )
    return found


def check_data(data: Any) -> None:
    """Raises where there are no samples. Sizes that are not known while something is traced are not asked for."""
    leaves = [leaf for leaf in tree.flatten(data) if leaf is not None]
    if not leaves:
        raise ValueError(f"{_DATA} Received: data={data!r}, which holds none")
    for leaf in leaves:
        if isinstance(leaf, int | float | complex):
            raise TypeError(f"{_DATA} Received: plain numbers, such as {leaf!r}. Make one array of them")
        if not hasattr(leaf, "shape"):
            raise TypeError(f"{_DATA} Received: a {type(leaf).__name__}")
        shape = leaf.shape
        if getattr(shape, "rank", 0) is None:
            continue
        if len(shape) == 0:
            raise ValueError(
                f"{_DATA} Received: a scalar, which has no samples. What is the same for all of them "
                "can be used in `loss_fn` without being part of the data"
            )
        if shape[0] == 0:
            raise ValueError(f"Expected `data` to hold at least one sample. Received: shape {tuple(shape)}")
