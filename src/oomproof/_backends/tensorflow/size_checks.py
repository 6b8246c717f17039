"""Refusals that only a running graph can know of: sizes are not known while it is traced."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import tensorflow as tf

from oomproof._backends.common import predictions
from oomproof.errors import UnsupportedModelError

_MARK = "oomproof refuses: "
_END = " (end of refusal)"

_Function = TypeVar("_Function", bound=Callable[..., Any])


def insist(number: Any, wanted: Any, otherwise: str) -> None:
    """See `common.engine.Engine`."""
    if isinstance(number, int) and isinstance(wanted, int):
        predictions.insist(number, wanted, otherwise)
    else:
        message = f"{_MARK}{otherwise}{_END}"
        tf.debugging.assert_equal(tf.cast(number, tf.int64), tf.cast(wanted, tf.int64), message=message)


def refusing(function: _Function) -> _Function:
    """The function, which raises a refusal of the graph that it runs as what it is."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except tf.errors.InvalidArgumentError as error:
            if _MARK not in error.message:
                raise
            text = error.message.split(_MARK)[1].split(_END)[0]
        raise UnsupportedModelError(text)

    return call  # type: ignore[return-value]
