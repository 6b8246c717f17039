"""The backend this process tests: what of the suite runs on it, in which modes, and how it says that memory is out.

The suite is written once and runs once per backend, each in a process of its own: KERAS_BACKEND chooses. What a backend
does not run is marked with `only`, whose reason is a row of the table in docs/backends.md (held by test_table.py).
"""

import keras
import pytest

BACKEND = keras.backend.backend()

# (run_eagerly, jit_compile) by name of the mode. "graph" is what a user gets who says nothing.
_SETTINGS = {
    "tensorflow": {"graph": (False, False), "eager": (True, False), "xla": (False, True)},
    "jax": {"graph": (False, True), "eager": (True, False), "xla": (False, True), "uncompiled": (False, False)},
    "torch": {"graph": (False, False), "eager": (True, False), "xla": (False, True)},
}[BACKEND]
# Names that mean the same computation as another on this backend.
_SAME = {
    "tensorflow": {"uncompiled": "graph"},
    "jax": {"xla": "graph"},
    "torch": {"eager": "graph", "uncompiled": "graph"},
}[BACKEND]
# What a test of arithmetic runs in unless it says otherwise. JAX compiles for seconds what runs once; op by op it
# computes the same from the same neutral code, and its compiled steps are tested by those who ask for "graph".
USUAL = "eager" if BACKEND == "jax" else "graph"
# A program that torch.compile makes takes half a minute, so few tests ask for one.
SLOW_COMPILES = BACKEND == "torch"


def only(*backends, because):
    """Marks a test, a case or a module as one for these backends. `because` is a row of docs/backends.md."""
    return pytest.mark.skipif(BACKEND not in backends, reason=f"{because} (docs/backends.md)")


def representative(values, *chosen):
    """Cases of which only the chosen belong to `make test`; the others are exhaustive."""
    return [value if value in chosen else pytest.param(value, marks=pytest.mark.exhaustive) for value in values]


def crossed(firsts, seconds):
    """Every pair. So many belong to `make test` that each value is in one; the others are exhaustive."""
    firsts, seconds = list(firsts), list(seconds)
    fewer = min(len(firsts), len(seconds))
    return [
        pytest.param(a, b, marks=[] if (i - j) % fewer == 0 else [pytest.mark.exhaustive])
        for i, a in enumerate(firsts)
        for j, b in enumerate(seconds)
    ]


def at_length(*backends):
    """Marks what is common to the backends: part of `make test` on these, and exhaustive on the others."""
    return (lambda test: test) if BACKEND in backends else pytest.mark.exhaustive


def modes(*names):
    """The modes to run a test in: those that are not the same as another one here."""
    return list(dict.fromkeys(_SAME.get(name, name) for name in names))


def set_mode(model, mode):
    model.run_eagerly, model.jit_compile = _SETTINGS[mode]


def out_of_memory(text=None):
    """An error as the framework raises it when the device has no memory left."""
    if BACKEND == "tensorflow":
        import tensorflow as tf

        return tf.errors.ResourceExhaustedError(None, None, text or "OOM when allocating tensor with shape[4096,4096]")
    if BACKEND == "jax":
        import jax

        return jax.errors.JaxRuntimeError(text or "RESOURCE_EXHAUSTED: Out of memory allocating 1073741824 bytes.")
    import torch

    return torch.OutOfMemoryError(text or "CUDA out of memory. Tried to allocate 2.00 GiB.")
