"""What Keras asks the device about while it is traced, answered for a GPU that is not there.

Keras hands an LSTM to cuDNN when JAX runs on a GPU. JAX then asks cuDNN how much room it wants, which needs the library
and the card; here a model answers. Attention in half precision goes to cuDNN, too, on cards that are new enough, and
then no scores are kept; JAX asks for the library's version and the card.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import jax

from oomproof._records.trace import Target

_NOTE = "LSTM layers run in cuDNN; what it keeps is modelled."
_ATTENTION_NOTE = "Attention is taken to run in cuDNN where it can: half precision, compute capability 8.0."
_ATTENTION = "jax._src.cudnn.fused_attention_stablehlo"
_CUDNN_VERSION = 91002
_LSTM_FIXED = 8 << 20


@contextlib.contextmanager
def traced_for(target: Target, notes: list[str]) -> Iterator[None]:
    """Inside, Keras traces as it would on the target.

    Args:
        target: The device.
        notes: Where to say what was assumed.
    """
    # Keras has a function of that name, too.
    keras_rnn = importlib.import_module("keras.src.backend.jax.rnn")
    if not target.gpu or jax.default_backend() == "gpu" or not hasattr(keras_rnn, "_is_gpu_available"):
        yield
        return
    from jax.experimental import rnn as jax_rnn

    def sizes(inputs: int, units: int, layers: int, batch: int, steps: int, dropout: float, both: bool, *_: Any) -> Any:
        if _NOTE not in notes:
            notes.append(_NOTE)
        return lstm_sizes(inputs, units, layers, batch, steps, both)

    name = "compute_rnn_workspace_reserve_space_sizes"
    with (
        mock.patch.object(keras_rnn, "_is_gpu_available", return_value=True),
        mock.patch.object(jax_rnn.gpu_rnn, name, sizes, create=True),
        _attention_as_on(target, notes),
    ):
        yield


@contextlib.contextmanager
def _attention_as_on(target: Target, notes: list[str]) -> Iterator[None]:
    """Inside, JAX finds cuDNN and the target's compute capability where it looks whether cuDNN can do attention."""
    try:
        fused = importlib.import_module(_ATTENTION)
    except ImportError:
        yield
        return

    def at_least(capability: str) -> bool:
        return target.capability >= tuple(map(int, capability.split(".")))

    def equal(capability: str) -> bool:
        return target.capability == tuple(map(int, capability.split(".")))

    def checked(*arguments: Any, **options: Any) -> Any:
        found = check(*arguments, **options)
        if _ATTENTION_NOTE not in notes:
            notes.append(_ATTENTION_NOTE)
        return found

    check: Any = getattr(fused, "check_is_flash_attention", None)
    answers = {
        "check_cudnn_version": lambda: _CUDNN_VERSION,
        "check_compute_capability": at_least,
        "is_cuda_compute_capability_equal": equal,
        "check_is_flash_attention": functools.wraps(check)(checked) if check else None,
    }
    with contextlib.ExitStack() as stack:
        for name, answer in answers.items():
            # Other versions of JAX have other questions; what is not there is not asked.
            if hasattr(fused, name):
                stack.enter_context(mock.patch.object(fused, name, answer))
        yield


def lstm_sizes(inputs: int, units: int, layers: int, batch: int, steps: int, both: bool) -> tuple[int, int]:
    """Bytes cuDNN wants while it runs an LSTM, and from its forward to its backward pass.

    As cuDNN answered for 44 layers drawn at random (benchmarks/estimate/kernels.py): to 1 % in one direction, to 12 %
    in both at once. Of several layers in one it was not asked.
    """
    cells = units * batch * steps * layers
    one = 20 * cells + 4 * inputs * batch * steps + 16 * units * (inputs + units) + 40 * batch * units + _LSTM_FIXED
    one += 8 * batch * steps * max(0, inputs - units)
    if not both:
        return one, 20 * cells
    return 2 * one - 4 * inputs * batch * steps + 16 * cells, 40 * cells


def lstm_workspace(params: dict[str, Any], inputs: Sequence[Any]) -> int:
    """Bytes of the array JAX hands cuDNN to work in: four for every one it asks for."""
    batch, steps = max((value.shape for value in inputs if len(value.shape) == 3 and value.shape[1] > 1), key=len)[:2]
    sizes = params["input_size"], params["hidden_size"], params["num_layers"]
    return 4 * lstm_sizes(*sizes, batch, steps, params["bidirectional"])[0]
