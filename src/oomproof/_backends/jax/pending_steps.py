"""Steps that run while Python goes on.

JAX hands back arrays before they are computed; that a step failed shows when somebody waits for them. A step whose
program has gone through before is not waited for at once. While it is pending, the values from before it and its batch
are kept, so that a step that fails late is undone and its batch run again: nothing is lost by having believed it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from keras import tree

_PATIENCE = 600.0


class PendingStep:
    """A step that was started and not waited for.

    Args:
        batch: (phase, data, spec), to run it again.
        before: (variable, value before the step) of all that it wrote.
        outcome: New values and logs, not computed yet perhaps.
        logs: The logs among them.
        settle: Waits for all pending steps, and runs those again that failed.
        needs: Bytes it takes while it runs.
    """

    def __init__(
        self,
        batch: tuple[Any, ...],
        before: list[tuple[Any, Any]],
        outcome: Any,
        logs: Any,
        settle: Callable[..., None],
        needs: int,
    ) -> None:
        self.batch = batch
        self.needs = needs
        self.before = before
        self._outcome = outcome
        self._logs = logs
        self._settle = settle
        self._thread = threading.get_ident()
        self._repeated = threading.Event()

    def wait(self) -> None:
        """Waits, and raises what the step died of."""
        jax.block_until_ready(self._outcome)
        self._outcome, self.before = None, []

    def logs(self) -> Any:
        """The logs, each of which can be read when it is there."""
        count = len(tree.flatten(self._logs))
        return tree.pack_sequence_as(self._logs, [_LateLog(self, index) for index in range(count)])

    def repeated_with(self, logs: Any) -> None:
        self._logs = logs
        self._repeated.set()

    def read(self, index: int) -> Any:
        try:
            return self._read(index)
        except Exception:
            if threading.get_ident() == self._thread:
                self._settle()
            elif not self._repeated.wait(_PATIENCE):
                raise
            return self._read(index)

    def _read(self, index: int) -> Any:
        if self._logs is None:
            return np.array(np.nan)
        # Waited for before it is read: reading an array that failed ends the process on some versions of JAX.
        return np.asarray(jax.block_until_ready(tree.flatten(self._logs)[index]))


class _LateLog:
    """A number that is waited for when it is looked at. If its step failed after all, it is that of the repetition."""

    def __init__(self, step: PendingStep, index: int) -> None:
        self._step = step
        self._index = index

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        return np.array(self._step.read(self._index), dtype=dtype)

    def __float__(self) -> float:
        return float(self._step.read(self._index))

    def __format__(self, spec: str) -> str:
        return format(float(self), spec)

    def __repr__(self) -> str:
        return repr(float(self))
