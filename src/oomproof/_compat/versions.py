"""The versions oomproof was tested with, and what happens outside of them. Imports no framework."""

from __future__ import annotations

import functools
import importlib.metadata
import os
import re
import sys
import warnings

from oomproof.errors import BackendError

# By package: the lowest version, and the first one that was not tested. pyproject.toml says the same.
SUPPORTED = {
    "keras": ("3.13", "3.16"),
    "tensorflow": ("2.19", "2.22"),
    "jax": ("0.5", "0.12"),
    "torch": ("2.11", "2.14"),
}
UNCHECKED = "OOMPROOF_UNCHECKED"
_NAMES = {"keras": "Keras", "tensorflow": "TensorFlow", "jax": "JAX", "torch": "torch"}


def require(backend: str) -> None:
    """Raises BackendError where Keras or the backend is of a version that was not tested, unless told not to check."""
    problem = problem_with(backend)
    if problem is None:
        return
    if os.environ.get(UNCHECKED) != "1":
        raise BackendError(f"{problem}, or set {UNCHECKED}=1 to train with it all the same.")
    _warn(f"{problem}. Not refused, since {UNCHECKED}=1.")


def warn(backend: str) -> None:
    """The same, as a warning: for what trains nothing."""
    if (problem := problem_with(backend)) is not None:
        _warn(f"{problem}. What is said may be wrong.")


def problem_with(backend: str) -> str | None:
    """What is not supported, and what to install, without a full stop; `None` where all is well."""
    return _problem(tuple((package, _installed(package)) for package in ("keras", backend)))


@functools.cache
def _problem(installed: tuple[tuple[str, str], ...]) -> str | None:
    for package, version in installed:
        lowest, untested = SUPPORTED[package]
        if not _numbers(lowest) <= _numbers(version) < _numbers(untested):
            return (
                f"oomproof supports {_NAMES[package]} from {lowest} to below {untested}, and {version} is installed: "
                f"run `pip install '{package}>={lowest},<{untested}'`"
            )
    return None


def at_least(version: str, other: str) -> bool:
    return _numbers(version) >= _numbers(other)


def _installed(package: str) -> str:
    loaded = getattr(sys.modules.get(package), "__version__", None)
    return str(loaded) if loaded is not None else importlib.metadata.version(package)


def _numbers(version: str) -> tuple[int, ...]:
    """`"2.13.0+cpu"` → `(2, 13, 0)`. A version yet to come counts as that version: it was not tested either."""
    return tuple(map(int, re.findall(r"\d+", re.match(r"[\d.]*", version)[0])))  # type: ignore[index]


@functools.cache
def _warn(text: str) -> None:
    """Once in a process."""
    # As a line of the user's, who called guard or fit.
    warnings.warn(text, UserWarning, stacklevel=5)
