"""How a step is compiled, as Keras decides it on a machine with a GPU."""

from __future__ import annotations

from typing import Any

from oomproof._backends.base import Backend
from oomproof._compat.keras import model_supports_jit
from oomproof._machine import gpus


def is_compiled(model: Any, backend: Backend) -> bool:
    """Whether Keras compiles the step on a machine with a GPU."""
    if model.run_eagerly:
        return False
    if backend.traits.compiles_on_gpu_only and gpus.local() is None:
        return bool(model_supports_jit(model))
    return bool(model.jit_compile)


def notes_on_jit(model: Any, backend: Backend) -> tuple[str, ...]:
    """Where nobody can tell what a model that is not compiled here will be on a GPU: what was taken for granted.

    A model saved by TensorFlow without a GPU asks for no compilation, which is then taken at its word. And on
    TensorFlow without a GPU a model that is never to be compiled looks like one about which nothing was said.
    """
    if backend.traits.compiles_on_gpu_only and model.compiled and not model.jit_compile and is_compiled(model, backend):
        return ("as Keras compiles it on a GPU, with XLA. For jit_compile=False: --no-jit, or jit=False.",)
    if not backend.traits.compiles_by_default or not model.compiled or model.jit_compile or model.run_eagerly:
        return ()
    return ("jit_compile=False, as in files saved by TensorFlow without a GPU: runs op by op. --jit compiles it.",)


def mode_of(backend: Backend, compiled: bool, model: Any) -> str:
    if compiled:
        return "compiled"
    return "eager" if model.run_eagerly else backend.traits.uncompiled_mode
