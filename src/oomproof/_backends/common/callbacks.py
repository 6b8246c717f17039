"""The one callback oomproof adds to `fit`: the step function is not told which epoch it is in."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import keras


class _EpochCallback(keras.callbacks.Callback):  # type: ignore[misc]
    def __init__(self, begin_epoch: Callable[[int], None]) -> None:
        super().__init__()
        self._begin_epoch = begin_epoch

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._begin_epoch(epoch)


@contextlib.contextmanager
def epochs_told(callbacks: Any, begin_epoch: Callable[[int], None]) -> Iterator[Any]:
    """The user's callbacks and ours, in the form the user gave them. The user's own list is not changed."""
    ours = _EpochCallback(begin_epoch)
    if isinstance(callbacks, keras.callbacks.CallbackList):
        callbacks.callbacks.append(ours)
        try:
            yield callbacks
        finally:
            callbacks.callbacks.remove(ours)
    elif callbacks is None:
        yield [ours]
    else:
        yield [*(callbacks if isinstance(callbacks, list | tuple) else [callbacks]), ours]
