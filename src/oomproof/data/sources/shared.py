"""What the sources share: checks of arguments, packages that may be missing, progress."""

from __future__ import annotations

import contextlib
import importlib
import math
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from oomproof.errors import BackendError

_ALIGNMENT = 64


def whole_number(value: Any, name: str, least: int) -> int:
    """An argument that counts something."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"Expected `{name}` to be an int of at least {least}. Received: {name}={value!r}")
    if value.__index__() < least:
        raise ValueError(f"Expected `{name}` to be at least {least}. Received: {name}={value!r}")
    return int(value)


def one_of(value: Any, name: str, *allowed: Any) -> Any:
    """An argument that is one of a few words."""
    if value not in allowed:
        raise ValueError(f"Expected `{name}` to be one of {', '.join(map(repr, allowed))}. Received: {name}={value!r}")
    return value


def needed(package: str, what: str) -> Any:
    """A package that only some sources need."""
    try:
        return importlib.import_module(package)
    except ImportError as missing:
        raise BackendError(
            f"Reading {what} needs {package}, which is not installed: pip install 'oomproof[data]'"
        ) from (missing)


def existing(path: Any, what: str) -> str:
    """A path that is there, as text."""
    path = os.fspath(path)
    if not os.path.exists(path):
        raise FileNotFoundError(f"Expected {what} that exists. Received: {path!r} (from {os.getcwd()!r})")
    return str(path)


def files_of(path: Any, what: str, belongs: Callable[[str], bool]) -> list[str]:
    """The files that are meant by a path: one, a list of them, or what belongs of a folder, in the order of its names.

    Args:
        path: What was given.
        what: What each is to be, in words.
        belongs: Whether a file of a folder is meant, by its name.
    """
    if isinstance(path, (list, tuple)):
        return [existing(each, what) for each in path]
    if os.path.isdir(existing(path, what)):
        return sorted(entry.path for entry in os.scandir(path) if belongs(entry.name))
    return [existing(path, what)]


def aligned(shape: tuple[int, ...], dtype: Any) -> Any:
    """An empty array that begins where TensorFlow and JAX like their tensors to, so that they need not copy it."""
    dtype = np.dtype(dtype)
    size = math.prod(shape) * dtype.itemsize
    room = np.empty(size + _ALIGNMENT, np.uint8)
    begin = -room.__array_interface__["data"][0] % _ALIGNMENT
    return room[begin : begin + size].view(dtype).reshape(shape)


def cores() -> int:
    """Threads for work that computes as much as it waits."""
    return max(1, min(8, os.cpu_count() or 1))


@contextlib.contextmanager
def progress(what: str) -> Iterator[Callable[[int], None]]:
    """Shows on a terminal how many there are so far. Elsewhere it shows nothing."""
    if not sys.stderr.isatty():
        yield lambda count: None
        return
    from rich.console import Console

    with Console(stderr=True).status(what) as status:
        yield lambda count: status.update(f"{what}: {count:,}") if count % 1000 == 0 else None
