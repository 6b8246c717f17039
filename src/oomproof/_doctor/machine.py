"""What there is to know of a machine: devices, who holds them, settings, versions, host memory and its limits.

Where control groups, devices and settings are read from can be handed in, so that tests can describe any machine.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import importlib.metadata
import json
import os
import pathlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import psutil

from oomproof._machine import host

_PACKAGES = (
    "keras",
    "tensorflow",
    "tensorflow-cpu",
    "tf-keras",
    "jax",
    "jaxlib",
    "jax-cuda12-plugin",
    "jax-cuda13-plugin",
    "torch",
    "numpy",
    "nvidia-cudnn-cu12",
    "nvidia-cudnn-cu13",
    "nvidia-cuda-runtime-cu12",
    "nvidia-cuda-runtime",
)


@dataclasses.dataclass(frozen=True)
class Process:
    """A process that holds memory of a card; `used` is `None` where the driver does not say."""

    pid: int
    used: int | None
    name: str = ""


@dataclasses.dataclass(frozen=True)
class Card:
    """A GPU as the driver sees it."""

    name: str
    total: int
    free: int
    processes: tuple[Process, ...] = ()


@dataclasses.dataclass(frozen=True)
class Machine:
    """What a checkup needs to know.

    Attributes:
        cards: GPUs.
        driver: Version of the driver, or why it does not answer.
        environment: Environment variables.
        packages: Versions of what is installed.
        memory: Bytes of RAM, `None` where that cannot be read.
        available: Bytes of RAM that are free, or would be.
        swap: Bytes of swap.
        cgroup_limit: Bytes this process and its kin may use, `None` without a limit.
        cgroup_used: Bytes they do use.
        shm: (bytes, free bytes) of /dev/shm, `None` where there is none.
        open_files: How many files a process may have open.
        keras_config: What ~/.keras/keras.json says.
        gpu_hardware: Whether there is an NVIDIA card even if the driver does not answer.
        pid: This process.
    """

    cards: tuple[Card, ...] = ()
    driver: str = ""
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    packages: Mapping[str, str] = dataclasses.field(default_factory=dict)
    memory: int | None = None
    available: int | None = None
    swap: int | None = None
    cgroup_limit: int | None = None
    cgroup_used: int | None = None
    shm: tuple[int, int] | None = None
    open_files: int | None = None
    keras_config: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    gpu_hardware: bool = False
    pid: int = 0

    @property
    def backend(self) -> str:
        """The backend that Keras would take."""
        return self.environment.get("KERAS_BACKEND") or str(self.keras_config.get("backend") or "tensorflow")


def this_machine(
    root: pathlib.Path = pathlib.Path("/"), environment: Mapping[str, str] | None = None, nvml: Any = None
) -> Machine:
    """What there is to know here.

    Args:
        root: Where control groups and devices are read from.
        environment: Environment variables; this process's own by default.
        nvml: A module like pynvml; the real one by default.
    """
    cards, driver = _cards(nvml)
    memory, available = host.machine_memory()
    limit, used = host.cgroup_limits(root)
    return Machine(
        cards=cards,
        driver=driver,
        environment=dict(os.environ) if environment is None else environment,
        packages=_installed(),
        memory=memory,
        available=available,
        swap=host.swap(),
        cgroup_limit=limit,
        cgroup_used=used,
        shm=_space(root / "dev/shm"),
        open_files=_open_files(),
        keras_config=_keras_config(),
        gpu_hardware=(root / "proc/driver/nvidia").exists() or (root / "dev/nvidiactl").exists(),
        pid=os.getpid(),
    )


def _cards(nvml: Any) -> tuple[tuple[Card, ...], str]:
    if nvml is None:
        try:
            nvml = importlib.import_module("pynvml")
        except ImportError:
            return (), "nvidia-ml-py is not installed"
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        return (), str(error)
    try:
        driver = _text(nvml.nvmlSystemGetDriverVersion())
        return tuple(_card(nvml, index) for index in range(nvml.nvmlDeviceGetCount())), driver
    except nvml.NVMLError as error:
        return (), str(error)
    finally:
        nvml.nvmlShutdown()


def _card(nvml: Any, index: int) -> Card:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    processes: Sequence[Any] = ()
    # Not every driver and container lets us see them.
    with contextlib.suppress(nvml.NVMLError):
        processes = nvml.nvmlDeviceGetComputeRunningProcesses(handle)
    found = tuple(Process(int(each.pid), each.usedGpuMemory, _process_name(int(each.pid))) for each in processes)
    return Card(_text(nvml.nvmlDeviceGetName(handle)), int(memory.total), int(memory.free), found)


def _text(text: str | bytes) -> str:
    return text.decode() if isinstance(text, bytes) else str(text)


def _process_name(pid: int) -> str:
    try:
        return psutil.Process(pid).name()
    except (OSError, psutil.Error):
        return ""


def _space(path: pathlib.Path) -> tuple[int, int] | None:
    try:
        found = os.statvfs(path)
    except OSError:
        return None
    return found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize


def _open_files() -> int | None:
    if sys.platform == "win32":
        return None
    import resource

    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def _installed() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _keras_config() -> dict[str, Any]:
    home = pathlib.Path(os.environ.get("KERAS_HOME", pathlib.Path.home() / ".keras"))
    try:
        found = json.loads((home / "keras.json").read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
