"""How much memory JAX has on the device it trains on, and which errors say that it ran out.

XLA plans the memory of a program when it compiles it, so what a program needs is known before it runs. That is also
how peaks are known: JAX cannot reset the peak it reports, and on the CPU it reports none.
"""

from __future__ import annotations

import re
import time
from typing import Any, NamedTuple

import jax
import keras

from oomproof._backends.base import MemoryUse, Shortage
from oomproof._backends.common.errors import forget_last_error, without_frames
from oomproof._records.run import Device
from oomproof._records.units import format_bytes

_OUT_OF_MEMORY = re.compile(
    r"RESOURCE_EXHAUSTED|out of memory|failed to allocate|CUDA_ERROR_OUT_OF_MEMORY|hipErrorOutOfMemory"
    r"|(CUDNN|CUBLAS|CUSOLVER|CUSPARSE|CUFFT)_STATUS_(ALLOC_FAILED|NOT_INITIALIZED)"
    # XLA's matrix library on the CPU does not say what failed; it is nothing else in practice.
    r"|YNNPACK operation failed"
    r"|Unable to allocate \S+ \S+ for an array",
    re.IGNORECASE,
)
# RESOURCE_EXHAUSTED is also what a full disk or too many open files look like.
_OTHER_RESOURCES = re.compile(
    r"no space left|disk quota|too many open files|file descriptor|received message larger|quota exceeded",
    re.IGNORECASE,
)
_GPUS = ("gpu", "cuda", "rocm")
# Of what is free, the share that is taken to lie in one block where the allocator does not tell. A program works in one
# block, and 94 to 99 % of what was free could not be had as one (H200, 0.3 to 1.5 GiB free).
_IN_ONE_BLOCK = 0.92
# A GPU's memory comes back a moment after the arrays that were in it are gone: threads of JAX's own give it back. A
# step that followed at once found the values of the one before still there, and was refused (H200, JAX 0.11.2).
_COMES_BACK, _LOOKS_AGAIN = 0.3, 0.005


class NotEnoughMemoryError(Exception):
    """Raised instead of running a program that is known not to fit. Nothing was run, so nothing can be lost."""

    def __init__(self, needed: int, free: int, where: str) -> None:
        super().__init__(
            f"The compiled program needs {format_bytes(needed)} besides what is in use, and "
            f"{format_bytes(free)} are free. It was not run."
        )
        self.needed = needed
        self.where = where


class Room(NamedTuple):
    """Bytes on a device: all that JAX may take, and what is free of a budget and can be had in one block."""

    all: int
    free: int


def host_for_proofs() -> Any:
    """The host, where there is room for samples that are looked at; `None` where JAX cannot compute there.

    It knows no host where JAX_PLATFORMS leaves it out, and a model on several devices stays there.
    """
    if keras.distribution.distribution() is not None:
        return None
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError:
        return None


class JaxMemory:
    """The first device of this process.

    On the CPU a budget alone is a limit: JAX itself knows none there.
    """

    advice = ""

    def __init__(self) -> None:
        self._device = jax.local_devices()[0]
        stats = self._stats()
        self._limit = int(stats["bytes_limit"]) if stats and "bytes_limit" in stats else None
        self._peak = 0
        # How many steps are pending. What they hold will be free again, so what is in use is then what was before them.
        self.pending = 0
        self._settled = 0

    def _stats(self) -> dict[str, int] | None:
        try:
            found: dict[str, int] | None = self._device.memory_stats()
        except (NotImplementedError, RuntimeError):
            return None  # How some platforms say that they keep no statistics; the CPU returns None.
        return found if found and "bytes_in_use" in found else None

    def describe(self) -> Device:
        platform = "GPU" if self._device.platform in _GPUS else self._device.platform.upper()
        return Device(f"{platform}:{self._device.id}", self._limit, measurable=True)

    def usage(self) -> MemoryUse:
        current = self.current()
        return MemoryUse(current, max(self._peak, current))

    def current(self) -> int:
        if not self.pending:
            self._settled = self._in_use()
        return self._settled

    def _in_use(self) -> int:
        if (stats := self._stats()) is not None:
            return int(stats["bytes_in_use"])
        mine = [array for array in jax.live_arrays() if self._device in array.devices()]
        return sum(array.nbytes // max(len(array.devices()), 1) for array in mine)

    def free(self, budget: int | None, wanted: int = 0) -> int | None:
        """Bytes a program may take, or `None` where there is no limit that is known.

        Args:
            budget: Bytes that are not to be exceeded.
            wanted: While less is free, it is waited for a moment.
        """
        limits = [limit for limit in (self._limit, budget) if limit is not None]
        if not limits:
            return None
        late = self._device.platform in _GPUS and not self.pending and wanted <= min(limits)
        until = time.monotonic() + (_COMES_BACK if late else 0)
        while True:
            free = max(min(limits) - self.current(), 0)
            if free >= wanted or time.monotonic() >= until:
                return free
            time.sleep(_LOOKS_AGAIN)

    def largest_block(self) -> int | None:
        """The most bytes that can be had at once, where the allocator tells."""
        stats = self._stats() or {}
        largest, pool = stats.get("largest_free_block_bytes", 0), stats.get("pool_bytes")
        # Only of what it has taken already. The rest it can still take, as one block.
        return max(largest, (self._limit or 0) - pool) if largest and pool else None

    def room(self, budget: int | None) -> Room | None:
        """What XLA can be told when it compiles, or `None` where there is no limit of its own."""
        free = self.free(budget)
        if self._device.platform not in _GPUS or self._limit is None or free is None:
            return None
        sure = int(_IN_ONE_BLOCK * free)
        return Room(self._limit, min(sure, self.largest_block() or sure))

    def is_short_of(self, needed: int, pending_bytes: int) -> bool:
        """Whether a program cannot go through, even if all pending steps were done. Cheap."""
        stats = self._stats()
        return (
            stats is not None
            and self._limit is not None
            and stats["bytes_in_use"] - pending_bytes + needed > self._limit
        )

    def ran(self, needed: int, before: int) -> None:
        """A program was run, or measured as if it were."""
        self._peak = max(self._peak, before + needed)

    def reset_peak(self) -> None:
        self._peak = 0

    def release(self) -> None:
        forget_last_error()

    def shortage(self, error: BaseException) -> Shortage | None:
        if isinstance(error, NotEnoughMemoryError):
            return Shortage(str(error), _where(error), error.needed, without_frames(error))
        # Copying to the device fails with a ValueError, NumPy on the host with a MemoryError.
        if not isinstance(error, jax.errors.JaxRuntimeError | ValueError | MemoryError | RuntimeError):
            return None
        text = str(error)
        if not (isinstance(error, MemoryError) or _OUT_OF_MEMORY.search(text)) or _OTHER_RESOURCES.search(text):
            return None
        if isinstance(error, ValueError) and "RESOURCE_EXHAUSTED" not in text:
            return None
        lines = [line.strip() for line in text.splitlines() if _OUT_OF_MEMORY.search(line)]
        return Shortage(
            text=(lines[0] if lines else type(error).__name__)[:300],
            where=_where(error),
            # What was asked for is one buffer of several. Of a compiled program all is known.
            needed=getattr(error, "needed", None),
            error=without_frames(error),
        )


def _where(error: BaseException) -> Any:
    return "commit" if getattr(error, "where", None) == "commit" else "step"
