"""How long a training waits for what helps it and is not needed for it.

Nothing is interrupted, and no thread is left behind: work that may take long looks at the clock between its parts, and
gives up there. A single part, such as one call of a compiler, is waited for.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator

# Seconds.
PATIENCE = 30.0


class TookTooLongError(Exception):
    """Somebody looked at the clock, and it was late."""


class _Thread(threading.local):
    # When the patience of this thread ends, and how long it was.
    end: float | None = None
    seconds: float = 0.0


_thread = _Thread()


@contextlib.contextmanager
def patience(seconds: float | None = None) -> Iterator[None]:
    """Inside, `look_at_the_clock` raises after so many seconds, `PATIENCE` by default. The outermost counts."""
    if _thread.end is not None:
        yield
        return
    _thread.seconds = PATIENCE if seconds is None else seconds
    _thread.end = time.monotonic() + _thread.seconds
    try:
        yield
    finally:
        _thread.end = None


def time_left() -> float | None:
    """Seconds until this thread gives up; `None` where it does not. Negative once it is late."""
    return None if _thread.end is None else _thread.end - time.monotonic()


def look_at_the_clock(ahead: float = 0.0) -> None:
    """Gives up where time is over, or will be before work is done that takes `ahead` seconds. Cheap.

    Raises:
        TookTooLongError: Inside of `patience`, when there is none left.
    """
    if _thread.end is not None and time.monotonic() + ahead > _thread.end:
        raise TookTooLongError(f"it takes longer than {_thread.seconds:.0f} s")
