"""What each framework's allocator says about the memory of this process, under a limit that leaves room for others."""

from __future__ import annotations

import importlib
import os
import subprocess

_CPU_LIMIT = 12000 * 2**20


def environment(stack: str, device: str, room: int | None, share: float) -> dict[str, str]:
    """Variables a process needs before it imports a framework.

    Args:
        stack: A stack of the design.
        device: `"gpu"` or `"cpu"`.
        room: Bytes the process may use, or `None` for no limit of ours.
        share: The same as a part of the card.
    """
    backend = stack.split("-")[0]
    found = {"KERAS_BACKEND": backend, "TF_CPP_MIN_LOG_LEVEL": "2", "PYTHONUNBUFFERED": "1"}
    if device == "cpu":
        found |= {"CUDA_VISIBLE_DEVICES": "-1", "JAX_PLATFORMS": "cpu", "TF_ENABLE_ONEDNN_OPTS": "0"}
        if backend == "tensorflow":
            found |= {"TF_CPU_ALLOCATOR_USE_BFC": "true", "TF_CPU_BFC_MEM_LIMIT_IN_MB": str(_cpu_limit(room) // 2**20)}
    elif backend == "jax" and room is not None:
        # Taken at the start, as JAX does by default: a pool that grows is cut up, and so counted, in another way.
        found["XLA_PYTHON_CLIENT_MEM_FRACTION"] = f"{share:.6f}"
    if backend != "tensorflow":
        # Keras may load TensorFlow beside another backend; it is not to take the card.
        found["TF_FORCE_GPU_ALLOW_GROWTH"] = "true"
    return found


class Meter:
    """Reads nothing, where there is nothing to read: JAX and torch on the CPU."""

    limit: int | None = None

    def reset(self) -> None:
        """Starts a new peak, where the allocator can."""

    def read(self) -> dict[str, int | None]:
        """Bytes in use now and at the peak so far, and what else the allocator counts."""
        return {"current": None, "peak": None}

    def programs(self) -> list[dict[str, int]] | None:
        """What XLA planned for the largest compiled programs, where it says."""
        return None


class TensorFlowMeter(Meter):
    def __init__(self, device: str, room: int | None) -> None:
        tf = importlib.import_module("tensorflow")
        self._config = tf.config.experimental
        self._name = "GPU:0" if device == "gpu" else "CPU:0"
        self.limit = room if device == "gpu" else _cpu_limit(room)
        if device == "gpu" and room is not None:
            # One region from the start, as TensorFlow does by default, only smaller.
            limit = tf.config.LogicalDeviceConfiguration(memory_limit=room // 2**20)
            tf.config.set_logical_device_configuration(tf.config.list_physical_devices("GPU")[0], [limit])

    def reset(self) -> None:
        self._config.reset_memory_stats(self._name)

    def read(self) -> dict[str, int | None]:
        info = self._config.get_memory_info(self._name)
        return {"current": int(info["current"]), "peak": int(info["peak"])}


class JaxMeter(Meter):
    """JAX's peak is that of the process, which therefore has only one run."""

    def __init__(self) -> None:
        self._device = importlib.import_module("jax").local_devices()[0]
        self.limit = (self._device.memory_stats() or {}).get("bytes_limit")

    def read(self) -> dict[str, int | None]:
        stats = self._device.memory_stats() or {}
        others = {key: stats[key] for key in ("largest_alloc_size", "bytes_reserved") if key in stats}
        return {"current": stats.get("bytes_in_use"), "peak": stats.get("peak_bytes_in_use"), **others}

    def programs(self) -> list[dict[str, int]] | None:
        found = []
        for executable in self._device.client.live_executables():
            stats = executable.get_compiled_memory_stats()
            names = ("argument", "output", "alias", "temp", "generated_code")
            found.append({name: int(getattr(stats, f"{name}_size_in_bytes")) for name in names})
        return sorted(found, key=lambda sizes: -sizes["argument"] - sizes["temp"])[:3]


class TorchMeter(Meter):
    def __init__(self, room: int | None) -> None:
        self._cuda = importlib.import_module("torch").cuda
        self.limit = int(self._cuda.get_device_properties(0).total_memory)
        if room is not None:
            self._cuda.set_per_process_memory_fraction(room / self.limit)
            self.limit = room

    def reset(self) -> None:
        self._cuda.reset_peak_memory_stats()

    def read(self) -> dict[str, int | None]:
        cuda = self._cuda
        return {
            "current": int(cuda.memory_allocated()),
            "peak": int(cuda.max_memory_allocated()),
            "reserved": int(cuda.memory_reserved()),
            "peak_reserved": int(cuda.max_memory_reserved()),
        }


def meter(stack: str, device: str, room: int | None) -> Meter:
    """The meter of a stack. Makes the limit, so it comes before anything is put on the device."""
    if stack.startswith("tensorflow"):
        return TensorFlowMeter(device, room)
    if stack == "jax":
        return JaxMeter()
    return TorchMeter(room) if device == "gpu" else Meter()


def _cpu_limit(room: int | None) -> int:
    return _CPU_LIMIT if room is None else room


def card_bytes() -> int | None:
    """Size of the first card, or `None` where there is none."""
    found = _query("--query-gpu=memory.total")
    return int(found[0]) * 2**20 if found else None


def driver_bytes() -> dict[str, int | None]:
    """What the driver shows: for this process, where it can be told apart, and for the whole card."""
    used = _query("--query-gpu=memory.used")
    apps = dict(line.split(", ", 1) for line in _query("--query-compute-apps=pid,used_memory"))
    mine = apps.get(str(os.getpid()), "")
    return {
        "process": int(mine) * 2**20 if mine.isdigit() else None,
        "card": int(used[0]) * 2**20 if used else None,
    }


def _query(what: str) -> list[str]:
    command = ["nvidia-smi", what, "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return [line for line in answer.stdout.splitlines() if line.strip()]
