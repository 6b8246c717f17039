"""The only rooms that import a framework. Each backend is imported when it is first used."""

from __future__ import annotations

import importlib

from oomproof._backends.base import Backend
from oomproof.errors import BackendError

# Filled in as backends are written; what is not here is refused with a clear message.
SUPPORTED = {
    "jax": "oomproof._backends.jax",
    "tensorflow": "oomproof._backends.tensorflow",
    "torch": "oomproof._backends.torch",
}


def current() -> Backend:
    """The backend Keras runs on in this process."""
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
    backend: Backend = importlib.import_module(SUPPORTED[name]).backend()
    return backend
