"""The lean commit: for models whose new values do not fit on the device beside the old ones.

Keras's optimizer runs as it is, op by op and in place. Before it does, every variable it may write is copied to
the host, so that a failure, or Ctrl-C, in the middle is undone.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from oomproof._backends.common.model import written_by_update
from oomproof._backends.tensorflow.writes import COMMIT_SCOPE

_RESTORED_AT_ONCE = 2**20


def commit_leanly(
    model: Any,
    gradients: Sequence[Any],
    pending: Sequence[tuple[Any, Any]],
    apply: Callable[[list[Any]], Any],
) -> None:
    """Applies the gradients and the pending writes; if anything fails, puts everything back and raises.

    Args:
        model: The model.
        gradients: One for each trainable weight, or none at all.
        pending: (variable, value) pairs to be assigned besides.
        apply: Runs the optimizer, in place, on the gradients.
    """
    optimizer = model.optimizer
    variables = [*(variable for variable, _ in pending), *(model.trainable_variables if gradients else ())]
    if gradients:
        variables += written_by_update(optimizer)
    journal: list[tuple[tf.Variable, np.ndarray[Any, Any]]] = []
    try:
        for variable in variables:
            # np.array around it: on the CPU .numpy() alone may share the variable's memory.
            journal.append((variable._value, np.array(variable._value.numpy())))
        if gradients:
            with tf.name_scope(COMMIT_SCOPE):
                apply(list(gradients))
        for variable, value in pending:
            variable.assign(value)
    except BaseException as error:
        # The frames of the failed update hold its tensors, and with them the memory that undoing it may need.
        traceback.clear_frames(error.__traceback__)
        _put_back(journal)
        if isinstance(error, tf.errors.OpError):
            # Run eagerly, ops have no names: say in the error itself where it happened.
            raise type(error)(None, None, f"{error.message} [in {COMMIT_SCOPE}]") from None
        raise


def _put_back(journal: Sequence[tuple[tf.Variable, np.ndarray[Any, Any]]]) -> None:
    """Restores what has changed. What the update did not reach is left alone: that needs no memory."""
    for variable, value in journal:
        if variable.numpy().tobytes() == value.tobytes():
            continue
        try:
            variable.assign(value)
        except tf.errors.OpError:
            _overwrite(variable, value)


def _overwrite(variable: tf.Variable, value: np.ndarray[Any, Any]) -> None:
    """Restores a value in place, in slices, where there is no room for a second copy.

    Not with `variable[a:b].assign`, which reads the whole variable first. A last resort: TensorFlow copies a
    variable that was ever written in slices whenever it is read.
    """
    rows = max(1, _RESTORED_AT_ONCE * len(value) // value.nbytes)
    for start in range(0, len(value), rows):
        piece = value[start : start + rows]
        tf.raw_ops.ResourceStridedSliceAssign(
            ref=variable.handle, begin=[start], end=[start + len(piece)], strides=[1], value=piece
        )
