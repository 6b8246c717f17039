"""Letting go of an error: its frames hold the tensors of the step that failed."""

from __future__ import annotations

import gc
import sys
from typing import Any


def without_frames(error: Any) -> Any:
    """The error alone, to be shown as a cause."""
    error.__traceback__ = None
    error.__context__ = None
    error.__cause__ = None
    return error


def forget_last_error() -> None:
    """In a notebook or debugger the last traceback keeps the failed step's tensors."""
    for name in ("last_traceback", "last_value", "last_exc"):
        if isinstance(getattr(sys, name, None), BaseException) or name == "last_traceback":
            sys.__dict__.pop(name, None)
    gc.collect()
