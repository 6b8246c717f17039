"""GPUs by name, what a framework can use of each, and the one in this machine.

Sizes are what CUDA reports as a card's memory, a few percent below the printed size. What a framework can use is less
again: a context takes its part, TensorFlow leaves some to the system, and JAX takes three quarters.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import os
import re
from collections.abc import Iterable

from oomproof._records.units import format_bytes, parse_budget

_MIB = 2**20
# What a process takes on the card before it has allocated anything: roughly 300 to 700 MiB with libraries loaded.
_CONTEXT = 500 * _MIB
# When TensorFlow looks how much is free its libraries are not loaded yet.
_CONTEXT_AT_FIRST = 250 * _MIB


@dataclasses.dataclass(frozen=True)
class Gpu:
    """A kind of card.

    Attributes:
        name: As it is asked for, such as `"rtx-4090"`.
        memory: Bytes that CUDA reports.
        capability: Compute capability.
    """

    name: str
    memory: int
    capability: tuple[int, int]

    def usable(self, backend: str) -> int:
        """Bytes the framework's allocator hands out at most, with the framework's defaults."""
        if backend == "tensorflow":
            return max(0, self.memory - _CONTEXT_AT_FIRST - _kept_by_tensorflow(self.capability))
        if backend == "jax":
            return int(self.memory * float(os.environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.75")))
        return max(0, self.memory - _CONTEXT)

    def shown(self, backend: str, reserved: int) -> int:
        """Bytes that nvidia-smi will show for a process whose allocator needs `reserved`."""
        takes_all_at_once = backend in ("tensorflow", "jax")
        return (self.usable(backend) if takes_all_at_once else reserved) + _CONTEXT

    def __str__(self) -> str:
        return f"{self.name} ({format_bytes(self.memory)})"


def _kept_by_tensorflow(capability: tuple[int, int]) -> int:
    major = capability[0]
    return (500 if major <= 6 else 1050 if major == 7 else 1536 if major == 8 else 1800) * _MIB


def _catalogue() -> dict[str, Gpu]:
    """{name: GPU}, from lines of name, MiB and compute capability."""
    lines = """
        k80 11441 3.7            p4 7611 6.1              p40 22919 6.1            p100-16gb 16276 6.0
        gtx-1060-6gb 6078 6.1    gtx-1070 8117 6.1        gtx-1080 8117 6.1        gtx-1080-ti 11178 6.1
        titan-xp 12192 6.1       titan-v 12066 7.0        v100-16gb 16160 7.0      v100-32gb 32510 7.0
        t4 15102 7.5             titan-rtx 24217 7.5      quadro-rtx-8000 48593 7.5
        gtx-1650 3903 7.5        gtx-1660 5944 7.5        gtx-1660-ti 5944 7.5     rtx-2060 5935 7.5
        rtx-2070 7981 7.5        rtx-2080 7981 7.5        rtx-2080-ti 11019 7.5
        a100-40gb 40442 8.0      a100-80gb 81050 8.0      a30 24062 8.0
        a10 22723 8.6            a10g 22723 8.6           a16 15002 8.6            a40 45517 8.6
        a2 14936 8.6             rtx-a2000 12044 8.6      rtx-a4000 16108 8.6      rtx-a5000 24247 8.6
        rtx-a6000 48682 8.6      rtx-3050 7970 8.6        rtx-3060 12050 8.6       rtx-3060-ti 7973 8.6
        rtx-3070 7973 8.6        rtx-3070-ti 7973 8.6     rtx-3080-10gb 10009 8.6  rtx-3080-12gb 12045 8.6
        rtx-3080-ti 12045 8.6    rtx-3090 24259 8.6       rtx-3090-ti 24247 8.6
        l4 22563 8.9             l40 45465 8.9            l40s 45465 8.9           rtx-6000-ada 48521 8.9
        rtx-4000-ada 20047 8.9   rtx-4060 7808 8.9        rtx-4060-ti-8gb 7808 8.9 rtx-4060-ti-16gb 15973 8.9
        rtx-4070 11874 8.9       rtx-4070-super 11874 8.9 rtx-4070-ti 11874 8.9    rtx-4070-ti-super 15945 8.9
        rtx-4080 15945 8.9       rtx-4080-super 15945 8.9 rtx-4090 24217 8.9
        h100-80gb 81090 9.0      h100-94gb 95320 9.0      h200 143160 9.0          gh200 96768 9.0
        b200 182640 10.0         rtx-5060-ti-16gb 15847 12.0  rtx-5070 11773 12.0  rtx-5070-ti 15847 12.0
        rtx-5080 15847 12.0      rtx-5090 32112 12.0      rtx-pro-6000 97251 12.0
    """
    words = lines.split()
    found = {}
    for name, mib, capability in zip(words[::3], words[1::3], words[2::3], strict=True):
        major, minor = capability.split(".")
        found[name] = Gpu(name, int(mib) * _MIB, (int(major), int(minor)))
    return found


CATALOGUE = _catalogue()


def find(name: str) -> Gpu:
    """The card of that name, however it is written: `"RTX 4090"`, `"NVIDIA A100-SXM4-40GB"`, `"t4"`.

    Raises:
        ValueError: For a name that fits no card, with the nearest ones, or more than one.
    """
    if not isinstance(name, str):
        raise TypeError(f'Expected `gpu` to be a name such as "rtx-4090". Received: gpu={name!r}')
    wanted = _plain(name)
    by_plain = {_plain(known): gpu for known, gpu in CATALOGUE.items()}
    if wanted in by_plain:
        return by_plain[wanted]
    # "a100" alone, or a card that comes in two sizes.
    sizes = [gpu for known, gpu in CATALOGUE.items() if re.fullmatch(re.escape(wanted) + r"\d+gb", _plain(known))]
    if len(sizes) == 1:
        return sizes[0]
    if sizes:
        raise ValueError(f"Several cards are called {name!r}: {_listed(gpu.name for gpu in sizes)}. Name one of them.")
    near = difflib.get_close_matches(wanted, by_plain, n=4, cutoff=0.6)
    hint = f"Near matches: {_listed(by_plain[match].name for match in near)}. " if near else ""
    raise ValueError(
        f"There is no GPU {name!r} in the catalogue. {hint}`oomproof gpus` lists all. For another card, give its "
        'memory, such as memory="24GiB" (--memory 24GiB).'
    )


def _plain(name: str) -> str:
    """What is left of a name without the maker, the board and everything that is written in several ways."""
    lowered = re.sub(r"nvidia|geforce|tesla|sxm\d?|pcie|nvl|hbm\d?e?", "", name.lower())
    return re.sub(r"[^a-z0-9]", "", lowered)


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names)


def of_memory(size: int | str) -> Gpu:
    """A card of which nothing but its memory is known."""
    memory = parse_budget(size, device_bytes=None)
    assert memory is not None
    return Gpu("a card", memory, (8, 0))


@functools.cache
def local() -> Gpu | None:
    """The first GPU of this machine, or `None` where there is none or the driver does not answer."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    try:
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        name = pynvml.nvmlDeviceGetName(handle)
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
        major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(handle)
        # What the driver keeps for itself cannot be used by anybody.
        reserved = getattr(memory, "reserved", 0)
        return Gpu(str(name), int(memory.total - reserved), (int(major), int(minor)))
    except pynvml.NVMLError:
        return None
    finally:
        pynvml.nvmlShutdown()
