"""The memory a driver may use: how much that is, what a step took of it, and what is left."""

from __future__ import annotations

from oomproof._backends.base import DeviceMemory, MemoryUse
from oomproof._training import messages, piece_sizes


class Allowance:
    """What a training may use of a device's memory.

    Args:
        memory: The device's.
        budget: Bytes not to be exceeded, or `None` for what the device has.

    Attributes:
        device: What the device is.
        limit: Bytes there are, or `None` where nobody knows.
        measurable: Whether use, peak and limit are known, so that sizes can be computed.
        headroom: The share of what is free that sizes are computed for.
    """

    def __init__(self, memory: DeviceMemory, budget: int | None) -> None:
        self._memory = memory
        self.device = memory.describe()
        if budget is not None and not self.device.measurable:
            raise messages.budget_cannot_be_held(budget, self.device, memory.advice)
        self.limit = self.device.limit if budget is None else budget
        self.measurable = self.device.measurable and self.limit is not None
        on_cpu = self.device.name.upper().startswith("CPU")
        promised = budget is not None and on_cpu
        self.headroom = piece_sizes.CPU_BUDGET_HEADROOM if promised else piece_sizes.HEADROOM
        # Whether what reads data ahead takes from the same memory while a step runs, and a promise covers that, too.
        self.covers_reading = promised
        self._resting = 0

    def free(self) -> int:
        assert self.limit is not None
        return max(self.limit - self.taken(), 0)

    def taken(self) -> int:
        return self._use().current

    def watch(self) -> int:
        """From here on the peak counts. Returns what is in use."""
        self._memory.reset_peak()
        return self.taken()

    def peak(self) -> int:
        """The peak since `watch`."""
        use = self._use()
        self._resting = use.current
        return use.peak

    def release(self) -> None:
        """Gives back what a failed step left behind."""
        # Collecting garbage takes a good part of a second in a large process, so only where it is needed.
        if not self.measurable or self.taken() > self._resting + 2**20:
            self._memory.release()

    def _use(self) -> MemoryUse:
        use = self._memory.usage()
        assert use is not None
        return use
