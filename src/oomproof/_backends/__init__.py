"""The only rooms that import a framework. Each backend is imported when it is first used."""

from __future__ import annotations

import importlib

from oomproof._backends.base import Backend
from oomproof._compat import versions
from oomproof.errors import BackendError

# Filled in as backends are written; what is not here is refused with a clear message.
SUPPORTED = {
    "jax": "oomproof._backends.jax",
    "tensorflow": "oomproof._backends.tensorflow",
    "torch": "oomproof._backends.torch",
}


def current(*, trains: bool = False) -> Backend:
    """The backend Keras runs on in this process.

    Args:
        trains: Whether a model is to be trained with it.

    Raises:
        BackendError: Keras or its backend is missing or not supported, or `trains` with a version that was not tested.
    """
    try:
        import keras
    except ImportError as error:
        raise BackendError(
            "Keras could not be imported. Install it with a backend: pip install 'oomproof[tensorflow]'."
        ) from error
    name = keras.backend.backend()
    if name not in SUPPORTED:
        raise BackendError(
            f"Keras runs on the {name!r} backend here; this version of oomproof supports "
            f"{', '.join(sorted(SUPPORTED))}. Set KERAS_BACKEND before Keras is imported."
        )
    (versions.require if trains else versions.warn)(name)
    try:
        backend: Backend = importlib.import_module(SUPPORTED[name]).backend()
    except (ImportError, AttributeError) as error:
        if (problem := versions.problem_with(name)) is None:
            raise
        raise BackendError(f"{problem}. Something that oomproof leans on is gone: {error}") from error
    return backend
