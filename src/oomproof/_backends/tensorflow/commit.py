"""The lean commit: for models whose new values do not fit on the device beside the old ones.

Keras's optimizer runs as it is, op by op and in place. Before it does, every variable it may write is copied to
the host, so that a failure, or Ctrl-C, in the middle is undone.
"""

from __future__ import annotations

import contextlib
import functools
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from oomproof._backends.common.engine import taken_back, to_the_end
from oomproof._backends.common.model import written_by_update
from oomproof._backends.tensorflow.writes import COMMIT_SCOPE
from oomproof.errors import BackendError

# A variable and the value it had.
_Kept = tuple[tf.Variable, np.ndarray[Any, Any]]
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
    journal: list[_Kept] = []
    try:
        journal = _journal(variable._value for variable in variables)
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


@contextlib.contextmanager
def changed(variables: Sequence[tf.Variable], change: Callable[[Any], Any]) -> Iterator[None]:
    """While it lasts, variables are as `change` makes them. Then they are put back, whatever happened."""
    journal = _journal(variables)
    with taken_back(lambda: _put_back(journal)):
        for variable, value in journal:
            variable.assign(change(value))
        yield


def _journal(variables: Iterable[tf.Variable]) -> list[_Kept]:
    # np.array around it: on the CPU .numpy() alone may share the variable's memory.
    return [(variable, np.array(variable.numpy())) for variable in variables]


def _put_back(journal: Sequence[_Kept]) -> None:
    """Restores what has changed. What the update did not reach is left alone: that needs no memory.

    Raises:
        BackendError: Some of it could not be restored, so nobody may go on.
    """
    left: list[_Kept] = []

    def restore() -> None:
        left[:] = [(variable, value) for variable, value in journal if not _is_restored(variable, value)]

    to_the_end(restore)
    if left:
        to_the_end(restore)  # Memory may have come back meanwhile.
    if left:
        raise BackendError(
            f"Memory ran out, and {len(left)} of {len(journal)} variables could not be put back to what they were: "
            "there is not even 1 MiB to copy them with. Do not use this model any more: load your last checkpoint."
        )


def _is_restored(variable: tf.Variable, value: np.ndarray[Any, Any]) -> bool:
    if variable.numpy().tobytes() == value.tobytes():
        return True
    for write in (variable.assign, functools.partial(_overwrite, variable)):
        try:
            write(value)
            return True
        except tf.errors.OpError:
            continue
    return False


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
