"""How much memory TensorFlow has on the device it trains on, and which errors say that it ran out."""

from __future__ import annotations

import functools
import os
import re
from typing import Any

import tensorflow as tf

from oomproof._backends.base import MemoryUse, Shortage
from oomproof._backends.common.errors import forget_last_error, without_frames
from oomproof._backends.common.footprint import bytes_of_outputs
from oomproof._backends.tensorflow.writes import COMMIT_SCOPE
from oomproof._records.run import Device

_OUT_OF_MEMORY = re.compile(
    r"OOM when allocating|out of memory|failed to allocate|ran out of memory|CUDA_ERROR_OUT_OF_MEMORY"
    r"|(CUDNN|CUBLAS|CUSOLVER|CUSPARSE)_STATUS_(ALLOC_FAILED|NOT_INITIALIZED)|Dst tensor is not initialized"
    r"|resource allocation failed"
    r"|allocate \d+ bytes"
    # cuDNN tries kernel after kernel, and there is room for none.
    r"|No algorithm worked|Failed to get convolution algorithm",
    re.IGNORECASE,
)
# What libraries also say when they do not get what they work in: memory only where there is hardly any left.
_PERHAPS_MEMORY = re.compile(
    r"(CUDNN|CUBLAS)_STATUS_(EXECUTION_FAILED|INTERNAL_ERROR)|cuDNN launch failure|Blas \w+ launch failed"
    r"|without BLAS support|failed to create cu\w+ handle",
    re.IGNORECASE,
)
_NEARLY_FULL = 0.9
# ResourceExhaustedError is also what a full disk or too many open files look like.
_OTHER_RESOURCES = re.compile(
    r"no space left|disk quota|too many open files|file descriptor|received message larger|quota exceeded",
    re.IGNORECASE,
)
# What a graph says that has no room left for one of its constants. TensorFlow made that graph itself, so it is whole.
_NO_ROOM_FOR_CONSTANT = "Cannot parse tensor from proto"
# XLA asks for all temporaries of a program at once, so the request is what the program needs.
_XLA_REQUEST = re.compile(r"out of memory (?:while )?trying to allocate (\d+) ?bytes", re.IGNORECASE)


# What a step that runs op by op takes, as a multiple of what its layers make.
_BESIDE_OUTPUTS = 4
# Most that one convolution may take beside its tensors: the setting, and its value as a share of the memory there is.
_WORKSPACE = "TF_CUDNN_WORKSPACE_LIMIT_IN_MB"
SEARCH_SHARE, _WORKSPACE_AT_LEAST, _WORKSPACE_AT_MOST = 16, 32, 8192


class TensorFlowMemory:
    """The first GPU, or the CPU's allocator where it has a limit (TF_CPU_ALLOCATOR_USE_BFC)."""

    advice = "give the CPU a limited allocator with TF_CPU_ALLOCATOR_USE_BFC=true before TensorFlow is imported, "

    def __init__(self) -> None:
        gpus = tf.config.list_logical_devices("GPU")
        self._name = "GPU:0" if gpus else "CPU:0"
        self._limit = _gpu_limit() if gpus else _cpu_limit()
        # Without a limit of its own the CPU's allocator reports zeros.
        self._measurable = bool(gpus) or _cpu_is_limited()

    def describe(self) -> Device:
        return Device(self._name, self._limit, self._measurable)

    def usage(self) -> MemoryUse | None:
        if not self._measurable:
            return None
        info = tf.config.experimental.get_memory_info(self._name)
        return MemoryUse(info["current"], info["peak"])

    def reset_peak(self) -> None:
        if self._measurable:
            tf.config.experimental.reset_memory_stats(self._name)

    def release(self) -> None:
        forget_last_error()

    def shortage(self, error: BaseException) -> Shortage | None:
        text = str(error)
        # A convolution for which no kernel worked is reported as not found.
        kinds = (
            tf.errors.ResourceExhaustedError,
            tf.errors.InternalError,
            tf.errors.UnknownError,
            tf.errors.NotFoundError,
        )
        found = isinstance(error, kinds) and self._says_memory(text) and not _OTHER_RESOURCES.search(text)
        constant = isinstance(error, tf.errors.InvalidArgumentError) and _NO_ROOM_FOR_CONSTANT in text
        if not found and not constant:
            return None
        asked = _XLA_REQUEST.search(text)
        return Shortage(
            text=_telling_line(text) or type(error).__name__,
            where="commit" if COMMIT_SCOPE in text else "step",
            needed=int(asked[1]) if asked else None,
            error=without_frames(error),
        )

    def _says_memory(self, text: str) -> bool:
        if _OUT_OF_MEMORY.search(text):
            return True
        use = self.usage() if _PERHAPS_MEMORY.search(text) else None
        # The peak: much of what the failed step held is free again by now.
        return use is not None and self._limit is not None and use.peak > _NEARLY_FULL * self._limit


def _telling_line(text: str) -> str:
    """What ran out: a graph tells first where in the user's code the op was made."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return next(filter(_OUT_OF_MEMORY.search, lines), lines[0] if lines else "")[:300]


def fits_op_by_op(model: Any, samples: int) -> bool:
    """Whether there is room for a plain step that runs op by op on a few samples. Where nobody knows, there is none.

    A step that is cut or recomputed may need much less than these samples do.
    """
    if not tf.config.list_logical_devices("GPU"):
        return True
    made, limit = bytes_of_outputs(model, samples), _gpu_limit()
    if made is None or limit is None:
        return False
    return _BESIDE_OUTPUTS * made < limit - int(tf.config.experimental.get_memory_info("GPU:0")["current"])


def bound_kernel_search(limit: int | None = None) -> None:
    """Keeps what cuDNN tries in the first step of each shape small beside the memory there is.

    TensorFlow tries every kernel once, with up to 8 GB to work in, and takes what it finds for that. It reads this
    setting at the first convolution of the process, and does not look at it again. One that is the user's stays.

    Args:
        limit: Bytes there are; what the GPU's allocator has by default.
    """
    limit = _gpu_limit() if limit is None else limit
    if limit is not None:
        share = limit // SEARCH_SHARE // 2**20
        os.environ.setdefault(_WORKSPACE, str(min(max(share, _WORKSPACE_AT_LEAST), _WORKSPACE_AT_MOST)))


def _cpu_is_limited() -> bool:
    return os.environ.get("TF_CPU_ALLOCATOR_USE_BFC", "").lower() in ("1", "true")


def _cpu_limit() -> int | None:
    if not _cpu_is_limited():
        return None
    # TensorFlow's own default, when only the allocator is chosen, is 64 GiB.
    return int(os.environ.get("TF_CPU_BFC_MEM_LIMIT_IN_MB", 64 * 1024)) * 2**20


@functools.cache
def _gpu_limit() -> int | None:
    # The allocator's limit, not the card's size: TensorFlow keeps some of the card back.
    from oomproof._compat.tensorflow import device_lib

    for device in device_lib.list_local_devices():
        if device.device_type == "GPU" and device.name.endswith("GPU:0"):
            return int(device.memory_limit)
    return None
