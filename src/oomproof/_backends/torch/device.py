"""How much memory torch has on the device Keras trains on, and which errors say that it ran out."""

from __future__ import annotations

import logging
import re

import torch

from oomproof._backends.base import MemoryUse, Shortage
from oomproof._backends.common.errors import forget_last_error, without_frames
from oomproof._backends.torch import expandable
from oomproof._backends.torch.commit import failed_in_commit
from oomproof._compat.torch import get_device
from oomproof._records.run import Device

logger = logging.getLogger("oomproof")

_OUT_OF_MEMORY = re.compile(
    r"out of memory"
    r"|DefaultCPUAllocator: (can't|not enough)|can't allocate memory|cannot allocate memory"
    r"|unable to allocate [\d.]+ .?.?B|std::bad_alloc|could not create a memory object"
    r"|(CUDNN|CUBLAS|CUSOLVER|CUSPARSE|CUFFT)_STATUS_(ALLOC_FAILED|NOT_INITIALIZED)"
    r"|(CUFFT|HIPFFT)_ALLOC_FAILED",
    re.IGNORECASE,
)
# What libraries also say when they do not get their workspace: memory only where there is hardly any left.
_PERHAPS_MEMORY = re.compile(
    r"CUDNN_STATUS_(INTERNAL_ERROR|EXECUTION_FAILED|NOT_SUPPORTED)|CUBLAS_STATUS_(INTERNAL_ERROR|EXECUTION_FAILED)"
    r"|unable to find a valid cuDNN algorithm|unable to find an engine|could not (create|execute) a primitive",
    re.IGNORECASE,
)
_NEARLY_FULL = 0.9
_OTHER_RESOURCES = re.compile(r"no space left|disk quota|too many open files|shared memory|\bshm\b", re.IGNORECASE)
# After one of these nothing can be done on the GPU any more in this process.
_LOST = re.compile(
    r"illegal memory access|device-side assert|unspecified launch failure|misaligned address|illegal instruction"
    r"|illegal address|hardware stack error|invalid program counter|context is destroyed|uncorrectable ECC"
    r"|fallen off the bus|cudaErrorLaunchTimeout|launch timed out",
    re.IGNORECASE,
)
_ASKED = re.compile(r"tried to allocate ([\d.]+) ?([KMGT]i?B|bytes)", re.IGNORECASE)
_UNUSED = re.compile(r"([\d.]+) ?([KMGT]i?B|bytes) is reserved by PyTorch but unallocated", re.IGNORECASE)
_ESCAPES = re.compile(r"\x1b\[[\d;]*m")
_UNITS = {"b": 0, "k": 1, "m": 2, "g": 3, "t": 4}
_EXPANDABLE = "expandable_segments:True"


class TorchMemory:
    """The device Keras places its variables on. A CPU has no allocator that could be asked."""

    advice = ""

    def __init__(self) -> None:
        device = torch.device(get_device())
        self._runtime = getattr(torch, device.type) if device.type in ("cuda", "xpu") else None
        self._index = device.index
        if self._runtime is not None and device.index is None:
            self._index = self._runtime.current_device()
        self._kind = device.type

    def describe(self) -> Device:
        if self._runtime is None:
            return Device({"cpu": "CPU:0", "mps": "MPS:0"}.get(self._kind, self._kind), None, False)
        name = "GPU" if self._kind == "cuda" else self._kind.upper()
        return Device(f"{name}:{self._index}", self._limit(), True)

    def _limit(self) -> int:
        """What torch's allocator can get: the free part of the card and what it has taken, up to the share it may have.

        What other processes hold is not counted, nor is the context, which lies outside of the allocator, nor are pages
        that are used in part.
        """
        assert self._runtime is not None
        free, total = self._runtime.mem_get_info(self._index)
        limit = free + self._runtime.memory_reserved(self._index)
        share = getattr(self._runtime, "get_per_process_memory_fraction", None)
        limit = min(limit, int(share(self._index) * total)) if share is not None else int(limit)
        return limit - expandable.IN_PART if self._kind == "cuda" and expandable.grow() else limit

    def usage(self) -> MemoryUse | None:
        if self._runtime is None:
            return None
        if self._kind == "cuda":
            # Several times quicker than memory_allocated, which makes a flat table of everything for each number.
            found = torch.cuda.memory_stats_as_nested_dict(self._index).get("allocated_bytes", {}).get("all", {})
            return MemoryUse(found.get("current", 0), found.get("peak", 0))
        return MemoryUse(self._runtime.memory_allocated(self._index), self._runtime.max_memory_allocated(self._index))

    def reset_peak(self) -> None:
        if self._runtime is not None:
            self._runtime.reset_peak_memory_stats(self._index)

    def release(self) -> None:
        forget_last_error()
        _forget_failed_backward()
        if self._runtime is not None:
            self._runtime.empty_cache()
        elif self._kind == "mps":
            torch.mps.empty_cache()

    def shortage(self, error: BaseException) -> Shortage | None:
        # Keras wraps the text of errors in its own words and colours.
        text = _ESCAPES.sub("", str(error))
        if not isinstance(error, Exception) or not self._says_memory(error, text):
            return None
        where = "commit" if failed_in_commit(error) else "step"
        line = _telling_line(text) or f"{type(error).__name__}: out of memory on the host"
        if _is_fragmented(text):
            line = f"{line} {_advice()}"
            _log_advice()
        # What torch says it asked for is one tensor, not what the step needs.
        return Shortage(line, "commit" if where == "commit" else "step", None, without_frames(error))

    def _says_memory(self, error: Exception, text: str) -> bool:
        if says_memory(error):
            return True
        perhaps = isinstance(error, RuntimeError) and _PERHAPS_MEMORY.search(text) and not is_lost(error)
        return bool(perhaps) and self._is_nearly_full()

    def _is_nearly_full(self) -> bool:
        if self._runtime is None:
            return False
        use = self.usage()
        assert use is not None
        # The peak: much of what the failed step held is free again by now.
        return use.peak > _NEARLY_FULL * self._limit()


def _forget_failed_backward() -> None:
    """A backward pass that failed leaves its graph in the queue of its thread, until the next one empties that."""
    # On the host, whatever the user's default device is: there may be no memory on that one.
    with torch.inference_mode(False), torch.enable_grad():
        torch.zeros((), device="cpu", requires_grad=True).clone().backward()


def says_memory(error: BaseException) -> bool:
    """Whether an error says by its kind or in its text that memory ran out."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    text = str(error)
    if not isinstance(error, RuntimeError) or _OTHER_RESOURCES.search(text) or is_lost(error):
        return False
    return bool(_OUT_OF_MEMORY.search(text))


def is_lost(error: BaseException) -> bool:
    """Whether the error has made the GPU unusable for this process."""
    text = str(error)
    kinds = (RuntimeError, getattr(torch, "AcceleratorError", RuntimeError))
    return isinstance(error, kinds) and bool(_LOST.search(text)) and bool(re.search("cuda|hip|gpu", text, re.I))


def _telling_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines()]
    telling = [line for line in lines if _OUT_OF_MEMORY.search(line) or _PERHAPS_MEMORY.search(line)]
    return next(iter([*telling, *filter(None, lines)]), "")[:300]


def _is_fragmented(text: str) -> bool:
    """Whether there was memory enough, in pieces that were too small, and something can be done about it."""
    asked, unused = _bytes(_ASKED.search(text)), _bytes(_UNUSED.search(text))
    enough = asked is not None and unused is not None and unused >= asked
    return enough and expandable.can_grow() and not expandable.grow()


def _bytes(found: re.Match[str] | None) -> int | None:
    return None if found is None else int(float(found[1]) * 1024 ** _UNITS[found[2][0].lower()])


def _advice() -> str:
    version = tuple(int(part) for part in re.findall(r"\d+", torch.__version__)[:2])
    name = "PYTORCH_ALLOC_CONF" if version >= (2, 9) else "PYTORCH_CUDA_ALLOC_CONF"
    return f"[Enough memory was free, in pieces that were too small: set {name}={_EXPANDABLE} in the environment.]"


_told: list[str] = []


def _log_advice() -> None:
    if not _told:
        _told.append(_advice())
        logger.warning(f"oomproof: {_told[0]}")
