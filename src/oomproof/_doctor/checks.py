"""A machine → findings, each with its severity and what to do."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from typing import Any

from oomproof._doctor.machine import Machine, Process, this_machine
from oomproof._records.diagnosis import Checkup, Finding
from oomproof._records.units import format_bytes

# Settings about memory, and what each is for.
_SETTINGS = {
    "TF_FORCE_GPU_ALLOW_GROWTH": "TensorFlow takes memory as it needs it",
    "TF_GPU_ALLOCATOR": "TensorFlow's allocator",
    "TF_GPU_THREAD_MODE": "threads of TensorFlow's kernels",
    "TF_CUDNN_WORKSPACE_LIMIT_IN_MB": "most that one convolution may take beside its tensors",
    "TF_CPU_ALLOCATOR_USE_BFC": "TensorFlow's GPU allocator on the CPU",
    "TF_CPU_BFC_MEM_LIMIT_IN_MB": "its limit",
    "TF_ENABLE_ONEDNN_OPTS": "oneDNN",
    "TF_CPP_MIN_LOG_LEVEL": "what TensorFlow logs",
    "TF_XLA_FLAGS": "XLA in TensorFlow",
    "XLA_FLAGS": "XLA",
    "XLA_PYTHON_CLIENT_PREALLOCATE": "JAX takes its share at once",
    "XLA_PYTHON_CLIENT_MEM_FRACTION": "JAX's share of the card",
    "XLA_PYTHON_CLIENT_ALLOCATOR": "JAX's allocator",
    "XLA_CLIENT_MEM_FRACTION": "JAX's share of the card",
    "JAX_PLATFORMS": "devices JAX looks for",
    "PYTORCH_CUDA_ALLOC_CONF": "torch's allocator",
    "PYTORCH_ALLOC_CONF": "torch's allocator",
    "PYTORCH_NO_CUDA_MEMORY_CACHING": "torch without its cache: slow",
    "PYTORCH_MPS_HIGH_WATERMARK_RATIO": "most that torch may take on a Mac",
    "CUDA_VISIBLE_DEVICES": "cards that can be seen",
    "KERAS_BACKEND": "Keras's backend",
}
_OURS = re.compile(r"(?:TF|XLA|PYTORCH|JAX|KERAS)_[A-Z0-9_]+|CUDA_VISIBLE_DEVICE\w*")
_TRUE = ("1", "true", "yes", "on")


def check(machine: Machine | None = None) -> Checkup:
    """Looks at a machine.

    Args:
        machine: What to look at; this one by default.

    Returns:
        A `Checkup`: findings with their severity and what to do.
    """
    machine = machine or this_machine()
    looks = (_devices, _backend, _builds, _preallocation, _settings, _typos, _versions, _host, _shared_memory, _files)
    return Checkup(tuple(finding for look in looks for finding in look(machine)))


# What is looked at


def _devices(machine: Machine) -> Iterator[Finding]:
    if not machine.cards and machine.gpu_hardware:
        yield Finding(
            "problem",
            "devices",
            f"There is an NVIDIA card, but its driver does not respond: {machine.driver or 'no reason given'}.",
            "nvidia-smi  # must list the card; in a container: docker run --gpus all",
        )
    elif not machine.cards:
        yield Finding("note", "devices", "No NVIDIA GPU: training runs on the CPU.")
    for index, card in enumerate(machine.cards):
        size = f"GPU {index}, {card.name}: {format_bytes(card.free)} of {format_bytes(card.total)} free"
        others = [process for process in card.processes if process.pid != machine.pid]
        held = card.total - card.free
        if held < 0.1 * card.total:
            yield Finding("ok", "devices", f"{size}.")
            continue
        who = ", ".join(_who(process) for process in sorted(others, key=lambda each: -(each.used or 0))[:3])
        named = f"held by {who}" if who else "held by processes that are not visible here"
        fix = f"ps -fp {others[0].pid}  # stop it if it is yours" if others else "nvidia-smi  # on the host"
        if len(machine.cards) > 1:
            freest = max(range(len(machine.cards)), key=lambda each: machine.cards[each].free)
            fix += f"; or CUDA_VISIBLE_DEVICES={freest}" if freest != index else ""
        yield Finding("problem" if held > 0.5 * card.total else "warning", "devices", f"{size}, {named}.", fix)


def _who(process: Process) -> str:
    size = "" if process.used is None else f" ({format_bytes(process.used)})"
    name = "".join(letter for letter in process.name if letter.isprintable())[:60]
    return f"process {process.pid}{f' {name}' if name else ''}{size}"


def _backend(machine: Machine) -> Iterator[Finding]:
    backend = machine.backend
    package = {"tensorflow": ("tensorflow", "tensorflow-cpu"), "jax": ("jax",), "torch": ("torch",)}.get(backend)
    where = "KERAS_BACKEND" if machine.environment.get("KERAS_BACKEND") else "Keras's backend"
    if package is None:
        fix = "KERAS_BACKEND=tensorflow  # or jax, or torch"
        yield Finding("problem", "backend", f"{where} is {_safe(backend)}, which oomproof does not support.", fix)
    elif not any(name in machine.packages for name in package):
        others = [name for name in ("tensorflow", "jax", "torch") if name in machine.packages]
        fix = f"KERAS_BACKEND={others[0]}" if others else f"pip install {backend}"
        yield Finding("problem", "backend", f"{where} is {backend}, which is not installed.", fix)
    else:
        version = next(machine.packages[name] for name in package if name in machine.packages)
        yield Finding(
            "ok", "backend", f"Keras {machine.packages.get('keras', '(not installed)')} on {backend} {version}."
        )


def _builds(machine: Machine) -> Iterator[Finding]:
    if not machine.cards and not machine.gpu_hardware:
        return
    packages = machine.packages
    if "tensorflow-cpu" in packages:
        fix = "pip uninstall tensorflow-cpu && pip install 'tensorflow[and-cuda]'"
        yield Finding("warning", "builds", "tensorflow-cpu is installed on a machine with a GPU.", fix)
    elif "tensorflow" in packages and not any(name.startswith("nvidia-cudnn") for name in packages):
        fix = "pip install 'tensorflow[and-cuda]'"
        yield Finding(
            "note", "builds", "TensorFlow is installed without its CUDA packages and relies on the system's.", fix
        )
    if "torch" in packages and "+cpu" in packages["torch"]:
        fix = "pip install torch --index-url https://download.pytorch.org/whl/cu128"
        yield Finding("warning", "builds", f"torch {packages['torch']} is built for CPUs only.", fix)
    if "jax" in packages and not any(re.fullmatch(r"jax-cuda\d+-plugin", name) for name in packages):
        fix = "pip install 'jax[cuda13]'  # or cuda12, by the driver"
        yield Finding("warning", "builds", "JAX is installed without a CUDA plugin: it trains on the CPU.", fix)


def _preallocation(machine: Machine) -> Iterator[Finding]:
    environment = machine.environment
    together = [name for name in ("tensorflow", "jax", "torch") if name in machine.packages]
    if machine.backend == "tensorflow" and machine.cards:
        growth = environment.get("TF_FORCE_GPU_ALLOW_GROWTH", "").lower() in _TRUE
        text = "allocates memory as needed" if growth else "takes nearly the whole card at startup"
        fix = "" if growth else "TF_FORCE_GPU_ALLOW_GROWTH=true  # if others share the card"
        yield Finding("ok" if growth or len(together) == 1 else "note", "preallocation", f"TensorFlow {text}.", fix)
    if machine.backend == "jax" and machine.cards:
        off = environment.get("XLA_PYTHON_CLIENT_PREALLOCATE", "").lower() in ("false", "0")
        share = (
            environment.get("XLA_PYTHON_CLIENT_MEM_FRACTION") or environment.get("XLA_CLIENT_MEM_FRACTION") or "0.75"
        )
        text = "allocates memory as needed" if off else f"takes {_safe(share)} of the card at startup"
        fix = "XLA_PYTHON_CLIENT_MEM_FRACTION=.92  # to use more" if not off and share == "0.75" else ""
        if _is_share(share):
            yield Finding("ok" if off else "note", "preallocation", f"JAX {text}.", fix)
    for name in ("XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_CLIENT_MEM_FRACTION"):
        if (given := environment.get(name)) is not None and not _is_share(given):
            text = f"{name}={_safe(given)} is not a number between 0 and 1."
            yield Finding("problem", "preallocation", text, f"{name}=.9")
    if environment.get("XLA_PYTHON_CLIENT_ALLOCATOR", "").lower() == "platform":
        text = "XLA_PYTHON_CLIENT_ALLOCATOR=platform frees every block at once: it is slow, and meant for debugging."
        yield Finding("warning", "preallocation", text, "unset XLA_PYTHON_CLIENT_ALLOCATOR")
    if environment.get("PYTORCH_NO_CUDA_MEMORY_CACHING", "").lower() in _TRUE:
        text = "PYTORCH_NO_CUDA_MEMORY_CACHING is set: the driver allocates every tensor, which is slow."
        yield Finding("warning", "preallocation", text, "unset PYTORCH_NO_CUDA_MEMORY_CACHING")


def _is_share(text: str) -> bool:
    try:
        return 0 < float(text) <= 1
    except ValueError:
        return False


def _settings(machine: Machine) -> Iterator[Finding]:
    shown = [f"{name}={_safe(value)}" for name, value in sorted(machine.environment.items()) if name in _SETTINGS]
    yield Finding("ok", "settings", ", ".join(shown) if shown else "No environment variable about memory is set.")
    environment = machine.environment
    if "PYTORCH_CUDA_ALLOC_CONF" in environment and "PYTORCH_ALLOC_CONF" in environment:
        text = "PYTORCH_CUDA_ALLOC_CONF and PYTORCH_ALLOC_CONF are both set, but they are the same setting."
        yield Finding("warning", "settings", text, "unset PYTORCH_CUDA_ALLOC_CONF")
    conf = environment.get("PYTORCH_ALLOC_CONF", environment.get("PYTORCH_CUDA_ALLOC_CONF", ""))
    if "expandable_segments:true" in conf.lower() and "max_split_size_mb" in conf.lower():
        text = "max_split_size_mb has no effect with expandable_segments."
        yield Finding("note", "settings", text, "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True")
    if environment.get("CUDA_VISIBLE_DEVICES") in ("", "-1") and machine.cards:
        text = "CUDA_VISIBLE_DEVICES hides every card: training runs on the CPU."
        yield Finding("problem", "settings", text, "unset CUDA_VISIBLE_DEVICES")
    if environment.get("TF_CPU_BFC_MEM_LIMIT_IN_MB") and environment.get("TF_ENABLE_ONEDNN_OPTS") != "0":
        text = "TF_CPU_BFC_MEM_LIMIT_IN_MB with oneDNN on: running out of memory ends the process."
        yield Finding("warning", "settings", text, "TF_ENABLE_ONEDNN_OPTS=0")


def _typos(machine: Machine) -> Iterator[Finding]:
    for name in sorted(machine.environment):
        if name in _SETTINGS or not _OURS.fullmatch(name):
            continue
        near = difflib.get_close_matches(name, _SETTINGS, n=1, cutoff=0.88)
        if near:
            text = f"{name} is set, but nothing reads it. Did you mean {near[0]}?"
            yield Finding("warning", "settings", text, f"export {near[0]}=...; unset {name}")


def _versions(machine: Machine) -> Iterator[Finding]:
    packages, found = machine.packages, False
    for text, fix in _clashes(packages):
        found = True
        yield Finding("problem", "versions", text, fix)
    if not found:
        names = ("keras", "tensorflow", "tensorflow-cpu", "jax", "torch", "numpy")
        shown = ", ".join(f"{name} {packages[name]}" for name in names if name in packages)
        yield Finding("ok", "versions", f"{shown or 'Nothing is installed'}; no known conflicts.")


def _clashes(packages: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    def version(name: str) -> tuple[int, ...]:
        return tuple(int(part) for part in re.findall(r"\d+", packages[name])[:3])

    def older(name: str, *than: int) -> bool:
        return name in packages and version(name) < than

    if older("keras", 3, 13):
        yield f"keras {packages['keras']} is older than oomproof supports.", "pip install 'keras>=3.13'"
    for name, least in (("tensorflow", (2, 18)), ("jax", (0, 5)), ("torch", (2, 5))):
        if older(name, *least):
            words = ".".join(map(str, least))
            yield f"{name} {packages[name]} is older than oomproof supports.", f"pip install '{name}>={words}'"
    if "jax" in packages and "jaxlib" in packages and version("jax")[:2] != version("jaxlib")[:2]:
        text = f"jax {packages['jax']} and jaxlib {packages['jaxlib']} are not from the same release."
        yield text, f"pip install jaxlib=={packages['jax']}"
    for name in packages:
        if (
            re.fullmatch(r"jax-cuda\d+-plugin", name)
            and "jaxlib" in packages
            and version(name)[:2] != version("jaxlib")[:2]
        ):
            text = f"{name} {packages[name]} does not match jaxlib {packages['jaxlib']}: JAX falls back to the CPU."
            yield text, f"pip install {name}=={packages['jaxlib']}"
    if "numpy" in packages and version("numpy") >= (2,) and (older("tensorflow", 2, 18) or older("torch", 2, 3)):
        yield f"numpy {packages['numpy']} with a framework that is built for NumPy 1.", "pip install 'numpy<2'"
    if "tensorflow" in packages and "tensorflow-cpu" in packages:
        text = "tensorflow and tensorflow-cpu are both installed, in the same place: either may run."
        yield text, "pip uninstall tensorflow-cpu tensorflow && pip install tensorflow"


def _host(machine: Machine) -> Iterator[Finding]:
    if machine.memory is None:
        yield Finding("note", "host memory", "The size of RAM cannot be read here.")
        return
    free = "" if machine.available is None else f", {format_bytes(machine.available)} available"
    swap = "" if machine.swap is None else ("; no swap" if not machine.swap else f"; {format_bytes(machine.swap)} swap")
    low = machine.available is not None and machine.available < 0.1 * machine.memory
    fix = "ps aux --sort=-rss | head  # what uses it" if low else ""
    yield Finding("warning" if low else "ok", "host memory", f"{format_bytes(machine.memory)} of RAM{free}{swap}.", fix)
    if machine.cgroup_limit is not None and machine.cgroup_limit < machine.memory:
        used = "" if machine.cgroup_used is None else f" ({format_bytes(machine.cgroup_used)} in use)"
        text = (
            f"This process is killed above {format_bytes(machine.cgroup_limit)}{used}: the limit of its control group."
        )
        tight = machine.cgroup_used is not None and machine.cgroup_used > 0.9 * machine.cgroup_limit
        severity: Any = "problem" if tight else "note"
        fix = "docker run --memory=..., resources.limits.memory, or Slurm's --mem to raise it"
        yield Finding(severity, "host memory", text, fix)
    on_cards = max((card.total for card in machine.cards), default=0)
    limit = min(machine.memory, machine.cgroup_limit or machine.memory)
    if on_cards > limit:
        text = f"The host has less memory ({format_bytes(limit)}) than a card ({format_bytes(on_cards)})."
        fix = "keras.utils.PyDataset  # read what a batch needs, not everything"
        yield Finding("warning", "host memory", text, fix)


def _shared_memory(machine: Machine) -> Iterator[Finding]:
    if machine.shm is None:
        return
    size, free = machine.shm
    text = f"/dev/shm has {format_bytes(size)}, {format_bytes(free)} free"
    if size <= 64 * 2**20 + 1:
        fix = "docker run --shm-size=8g  # or --ipc=host"
        yield Finding(
            "warning", "shared memory", f"{text}: the default of containers, too small for data workers.", fix
        )
    elif free < 0.1 * size:
        yield Finding("warning", "shared memory", f"{text}: nearly full.", "ls -la /dev/shm  # what earlier runs left")
    else:
        yield Finding("ok", "shared memory", f"{text}.")


def _files(machine: Machine) -> Iterator[Finding]:
    if machine.open_files is not None and machine.open_files < 4096:
        text = f"A process may open {machine.open_files} files; data workers need more."
        yield Finding("note", "open files", text, "ulimit -n 65536")


def _safe(text: str) -> str:
    return "".join(letter for letter in text if letter.isprintable())[:80]
