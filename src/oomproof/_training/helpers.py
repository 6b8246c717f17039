"""What helps a training and is not needed for it: when it fails, that is told, and training goes on."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

logger = logging.getLogger("oomproof")


@contextlib.contextmanager
def optional(what: str) -> Iterator[None]:
    """Turns an error of what runs inside into one warning.

    Args:
        what: What runs, as the beginning of a sentence: `"Remembering the plan"`.
    """
    try:
        yield
    except Exception as error:
        logger.warning(f"oomproof: {what} failed; training goes on without it ({in_a_line(error)}).")


def in_a_line(error: BaseException) -> str:
    """The type of an error, and the first line of what it says."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
