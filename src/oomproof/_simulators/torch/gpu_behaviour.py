"""What a step does otherwise on a GPU, for a machine that has none.

A torch without CUDA cannot differentiate tensors that claim to be on a GPU, fake or not. So the fake tensors are the
CPU's, while Keras is told that they are on the GPU, and what torch would choose to compute there is chosen here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from oomproof._compat.keras import draw_seed
from oomproof._compat.torch import device_scope
from oomproof._compat.torch_tracing import DESCRIBED, DEVICE, GRU, LSTM, RUN_BACKWARD, of_keras
from oomproof._records.trace import Target
from oomproof._simulators.torch.recording import Recorder
from oomproof._simulators.torch.recurrent import recurrent
from oomproof.errors import UnsupportedModelError

_GPU = torch.device("cuda", 0)
_HALF = (torch.float16, torch.bfloat16)
_FLASH_HEAD = 256


@contextlib.contextmanager
def on_gpu(target: Target, recorder: Recorder) -> Iterator[None]:
    """Everything inside believes to run on the GPU."""

    def flash(_: Any, query: Any, key: Any, value: Any, mask: Any = None, is_causal: bool = False, **__: Any) -> bool:
        return _flash_serves(target, query, mask)

    with (
        device_scope("cuda"),
        _answered("rnn", "_is_cuda_cudnn_available", lambda _: True),
        _answered("nn", "_can_use_flash_attention", flash),
        # torch compares what is computed again with the first time, devices included, which depend here on who asks.
        DESCRIBED.to(lambda *_: None),
        _OnGpu(target, recorder) as gpu,
        DEVICE.to(gpu.device),
        RUN_BACKWARD.to(gpu.run_backward),
    ):
        yield


@contextlib.contextmanager
def unseeded() -> Iterator[None]:
    """Random numbers come without a generator: there are none for fake tensors, nor for a GPU that is not there."""

    def drawn(_: Any, seed: Any) -> None:
        draw_seed(seed)

    with _answered("random", "torch_seed_generator", drawn), _answered("image", "_torch_seed_generator", drawn):
        yield


def _answered(module: str, name: str, answer: Callable[..., Any]) -> contextlib.AbstractContextManager[None]:
    """One of Keras's own functions answered here, where this Keras has it."""
    function = of_keras(module, name)
    return contextlib.nullcontext() if function is None else function.to(answer)


def _read_on_host(tensor: Any, dtype: Any = None) -> Any:
    """A number that code reads on the host, as Nadam does. What it is makes no difference to memory, if it is not 0."""
    if tensor.numel() > 1:
        raise UnsupportedModelError("The step reads a tensor's values on the host, and a trace has none.")
    return np.full(tuple(tensor.shape), 0.5, dtype or "float32")


class _OnGpu(TorchFunctionMode):  # type: ignore[misc]
    """Sees calls before torch looks at devices.

    Outside of them, that is in code of Keras's and the user's, tensors say that they are on the GPU; inside, where
    torch would believe it, they do not.
    """

    def __init__(self, target: Target, recorder: Recorder) -> None:
        super().__init__()
        self._target = target
        self._recorder = recorder
        self._inside = False
        self._instead: dict[Any, Callable[..., Any]] = {
            torch.nn.functional.dropout: _dropout,
            torch.nn.functional.scaled_dot_product_attention: self._attention,
            LSTM: recurrent("lstm"),
            GRU: recurrent("gru"),
            torch.Tensor.__array__: _read_on_host,
        }

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outer, self._inside = self._inside, True
        try:
            return self._call(func, args, kwargs or {})
        finally:
            self._inside = outer

    def _call(self, func: Any, args: Any, kwargs: Any) -> Any:
        instead = self._instead.get(func)
        if instead is not None:
            return instead(*args, **kwargs)
        moved = False
        if any(_is_gpu(arg) for arg in (*args, *kwargs.values())):
            args = tuple("cpu" if _is_gpu(arg) else arg for arg in args)
            kwargs = {name: "cpu" if _is_gpu(arg) else arg for name, arg in kwargs.items()}
            moved = func is torch.Tensor.to and self._recorder.is_on_host(args[0])
        if moved:
            return func(self._recorder.copied_to_device(args[0]), *args[1:], **kwargs)
        return func(*args, **kwargs)

    def run_backward(self, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The backward pass calls layers that are computed again, whose code is inside of no call."""
        outer, self._inside = self._inside, False
        super().__enter__()
        try:
            return run(*args, **kwargs)
        finally:
            super().__exit__(None, None, None)
            self._inside = outer

    def device(self, true_device: Callable[[Any], Any], tensor: Any) -> Any:
        if self._inside or self._recorder.running or self._recorder.is_on_host(tensor):
            return true_device(tensor)
        return _GPU

    def _attention(
        self,
        query: Any,
        key: Any,
        value: Any,
        attn_mask: Any = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Any:
        """The kernel torch takes on a GPU. Those that keep all scores are left for what the others cannot do."""
        if _flash_serves(self._target, query, attn_mask) and not enable_gqa:
            flash = torch.ops.aten._scaled_dot_product_flash_attention
            return flash(query, key, value, dropout_p, is_causal, scale=scale)[0]
        if enable_gqa or query.dim() != 4 or (attn_mask is not None and attn_mask.requires_grad):
            return torch.ops.aten._scaled_dot_product_attention_math(
                query, key, value, attn_mask, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa
            )[0]
        if attn_mask is not None:
            if attn_mask.dtype == torch.bool:
                attn_mask = torch.where(attn_mask, 0.0, float("-inf"))
            attn_mask = attn_mask.to(query.dtype).expand(*query.shape[:3], key.shape[2])
        differentiated = torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value))
        efficient = torch.ops.aten._scaled_dot_product_efficient_attention
        return efficient(query, key, value, attn_mask, differentiated, dropout_p, is_causal, scale=scale)[0]


def _flash_serves(target: Target, query: Any, mask: Any) -> bool:
    return (
        target.capability >= (8, 0)
        and query.dtype in _HALF
        and mask is None
        and query.dim() == 4
        and query.shape[-1] <= _FLASH_HEAD
    )


def _dropout(x: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
    """On a GPU one kernel, which keeps its mask in bytes rather than in numbers."""
    return torch.native_dropout(x, p, True)[0] if training and p > 0 else x


def _is_gpu(argument: Any) -> bool:
    if isinstance(argument, str):
        return argument.startswith("cuda")
    return isinstance(argument, torch.device) and argument.type == "cuda"
