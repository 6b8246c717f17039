"""The lean commit: for models whose new values do not fit on the device beside the old ones.

Keras's optimizer runs as it is, op by op and in place, a few rows of a variable at a time where it allows that
(common/rows.py). Before it does, every variable it may write is copied to the host, so that a failure, or Ctrl-C, in
the middle is undone.
"""

from __future__ import annotations

import contextlib
import functools
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from oomproof._backends.common import rows
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
            with tf.name_scope(COMMIT_SCOPE), _in_rows(optimizer):
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
def _in_rows(optimizer: Any) -> Iterator[None]:
    """Lets Keras update large variables a few rows at a time: the same numbers from less memory."""
    inner = rows.inner_of(optimizer)
    if not rows.goes_by_rows(inner):
        yield
        return
    update_whole = inner.update_step
    with rows.put_back_at_the_end(inner) as put_back:

        def update(gradient: Any, variable: Any, learning_rate: Any) -> None:
            parts = rows.bounds(variable)
            # Inside of a graph, and for gradients that are rows themselves, nothing is gained.
            if len(parts) < 2 or not tf.executing_eagerly() or isinstance(gradient, tf.IndexedSlices):
                update_whole(gradient, variable, learning_rate)
                return
            index = inner._get_variable_index(variable)
            whole = {"": variable} | {name: slot._value for name, slot in rows.slots_of(inner, index).items()}
            for start, stop in parts:
                some = {name: tf.Variable(each[start:stop]) for name, each in whole.items()}
                own = some.pop("")
                rows.stand_in(inner, index, some)
                update_whole(gradient[start:stop], own, learning_rate)
                for each, new in zip(whole.values(), (own, *some.values()), strict=True):
                    overwrite(each, new.value(), start)
            put_back()
            vars(inner)["update_step"] = update

        vars(inner)["update_step"] = update
        yield


def overwrite(variable: tf.Variable, value: Any, start: int = 0) -> None:
    """Writes rows of a variable where they are, which takes no memory if nobody else holds its value.

    Not with `variable[a:b].assign`, which reads the whole variable first. A variable that is written in slices is
    copied whenever it is read from then on, unless that is taken back.
    """
    stop = start + len(value)
    tf.raw_ops.ResourceStridedSliceAssign(ref=variable.handle, begin=[start], end=[stop], strides=[1], value=value)
    tf.raw_ops.DisableCopyOnRead(resource=variable.handle)


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
    """Restores a value in place, a few rows at a time, where there is no room for a second copy."""
    rows_at_once = max(1, _RESTORED_AT_ONCE * len(value) // value.nbytes)
    for start in range(0, len(value), rows_at_once):
        overwrite(variable, value[start : start + rows_at_once], start)
