"""What oomproof uses of JAX, and of Keras on it, beyond the public API.

Checked on JAX 0.5 to 0.11.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from keras.src.backend.jax import nn as _nn
from keras.src.backend.jax import random as _random
from keras.src.backend.jax.trainer import JAXEpochIterator as _JAXEpochIterator

from oomproof._compat.patches import Redirect, redirects

# Keras's random functions.
keras_random = _random
# What puts a batch on the device while the one before it is trained on; `None` in a Keras that does it otherwise.
BATCHES_AHEAD: Any = vars(_JAXEpochIterator).get("_one_batch_ahead_iterator")


@dataclasses.dataclass(frozen=True)
class CudnnQuestions:
    """What Keras and JAX ask of the device while a step is traced.

    Attributes:
        gpu: Whether there is one, for recurrent layers.
        rnn_sizes: How much room cuDNN wants for one.
        attention: By name, what JAX asks before it has cuDNN do attention. Versions ask different things.
    """

    gpu: Redirect
    rnn_sizes: Redirect
    attention: Mapping[str, Redirect]


@functools.cache
def cudnn_questions() -> CudnnQuestions | None:
    """`None` with a Keras that does not ask."""
    # Keras has a function of that name, too.
    rnn = importlib.import_module("keras.src.backend.jax.rnn")
    if not hasattr(rnn, "_is_gpu_available"):
        return None
    from jax.experimental import rnn as jax_rnn

    attention: Mapping[str, Redirect] = {}
    try:
        fused = importlib.import_module("jax._src.cudnn.fused_attention_stablehlo")
    except ImportError:
        pass
    else:
        attention = redirects(
            fused,
            "check_cudnn_version",
            "check_compute_capability",
            "is_cuda_compute_capability_equal",
            "check_is_flash_attention",
        )
    sizes = Redirect(jax_rnn.gpu_rnn, "compute_rnn_workspace_reserve_space_sizes", create=True)
    return CudnnQuestions(Redirect(rnn, "_is_gpu_available"), sizes, attention)


_attention = Redirect(_nn, "dot_product_attention")


@contextlib.contextmanager
def on_host() -> Iterator[None]:
    """Inside, Keras traces for the CPU though the process has a GPU: it picks kernels of cuDNN by what there is."""
    questions = cudnn_questions()
    with contextlib.ExitStack() as stack:
        stack.enter_context(_attention.to(_without_cudnn))
        if questions is not None:
            stack.enter_context(questions.gpu.to(lambda _: False))
        yield


def _without_cudnn(original: Callable[..., Any], query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
    # Even where a layer asks for it by name. XLA has no attention in half precision for CPUs either.
    dtype = query.dtype
    if dtype.itemsize < 4:
        query, key, value = (array.astype("float32") for array in (query, key, value))
    return original(query, key, value, *args, **{**kwargs, "flash_attention": False}).astype(dtype)
