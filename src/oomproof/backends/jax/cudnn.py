"""What Keras asks the device about while it is traced, answered for a GPU that is not there.

Keras hands an LSTM to cuDNN when JAX runs on a GPU. JAX then asks cuDNN how much room it wants, which needs the library
and the card; here a model answers.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import jax

from oomproof.tracing import Target

_NOTE = "LSTM layers run in cuDNN; what it keeps is modelled."


@contextlib.contextmanager
def as_on(target: Target, notes: list[str]) -> Iterator[None]:
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
        return lstm_sizes(units, layers, batch, steps, both)

    name = "compute_rnn_workspace_reserve_space_sizes"
    with (
        mock.patch.object(keras_rnn, "_is_gpu_available", return_value=True),
        mock.patch.object(jax_rnn.gpu_rnn, name, sizes, create=True),
    ):
        yield


def lstm_sizes(units: int, layers: int, batch: int, steps: int, both: bool) -> tuple[int, int]:
    """Bytes cuDNN wants while it runs an LSTM, and from its forward to its backward pass.

    Of every cell it keeps four gates, the state and the output, and works on the gradients of the gates. A model, which
    agrees with how the peak of two layers of 512 units grew with the batch on an H200, and was seen on nothing else.
    """
    cells = 4 * units * layers * batch * steps * (2 if both else 1)
    return 4 * cells, 6 * cells


def lstm_workspace(params: dict[str, Any], inputs: Sequence[Any]) -> int:
    """Bytes of the array JAX hands cuDNN to work in: four for every one it asks for."""
    batch, steps = max((value.shape for value in inputs if len(value.shape) == 3 and value.shape[1] > 1), key=len)[:2]
    both = params["bidirectional"]
    workspace, _ = lstm_sizes(params["hidden_size"], params["num_layers"], batch, steps, both)
    return 4 * workspace
