"""What Keras asks the device about while it is traced, answered for a GPU that is not there.

Keras hands an LSTM to cuDNN when JAX runs on a GPU. JAX then asks cuDNN how much room it wants, which needs the library
and the card; here a model answers. Attention in half precision goes to cuDNN, too, on cards that are new enough, and
then no scores are kept; JAX asks for the library's version and the card.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax

from oomproof._compat.jax import cudnn_questions
from oomproof._compat.patches import Redirect
from oomproof._records.trace import Target

_NOTE = "LSTM layers run in cuDNN; what it keeps is modelled."
_ATTENTION_NOTE = "Attention is taken to run in cuDNN where it can: half precision, compute capability 8.0."
_CUDNN_VERSION = 91002
_LSTM_FIXED = 8 << 20


@contextlib.contextmanager
def traced_for(target: Target, notes: list[str]) -> Iterator[None]:
    """Inside, Keras traces as it would on the target.

    Args:
        target: The device.
        notes: Where to say what was assumed.
    """
    questions = cudnn_questions() if target.gpu and jax.default_backend() != "gpu" else None
    if questions is None:
        yield
        return

    def sizes(
        _: Any, inputs: int, units: int, layers: int, batch: int, steps: int, dropout: float, both: bool, *__: Any
    ) -> Any:
        if _NOTE not in notes:
            notes.append(_NOTE)
        return lstm_sizes(inputs, units, layers, batch, steps, both)

    with (
        questions.gpu.to(lambda _: True),
        questions.rnn_sizes.to(sizes),
        _attention_as_on(target, notes, questions.attention),
    ):
        yield


@contextlib.contextmanager
def _attention_as_on(target: Target, notes: list[str], questions: Mapping[str, Redirect]) -> Iterator[None]:
    """Inside, JAX finds cuDNN and the target's compute capability where it looks whether cuDNN can do attention."""

    def at_least(_: Any, capability: str) -> bool:
        return target.capability >= tuple(map(int, capability.split(".")))

    def equal(_: Any, capability: str) -> bool:
        return target.capability == tuple(map(int, capability.split(".")))

    def checked(check: Any, *arguments: Any, **options: Any) -> Any:
        found = check(*arguments, **options)
        if _ATTENTION_NOTE not in notes:
            notes.append(_ATTENTION_NOTE)
        return found

    answers: dict[str, Callable[..., Any]] = {
        "check_cudnn_version": lambda _: _CUDNN_VERSION,
        "check_compute_capability": at_least,
        "is_cuda_compute_capability_equal": equal,
        "check_is_flash_attention": checked,
    }
    with contextlib.ExitStack() as stack:
        for name, question in questions.items():
            stack.enter_context(question.to(answers[name]))
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
