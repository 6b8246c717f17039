"""What every benchmark writes down about the machine it ran on, and where its result goes."""

from __future__ import annotations

import importlib.metadata
import json
import os
import pathlib
import platform
import subprocess
from typing import Any

RESULTS = pathlib.Path(__file__).parent / "results"
_PACKAGES = ("oomproof", "keras", "tensorflow", "jax", "torch", "numpy")


def environment() -> dict[str, Any]:
    """Versions, platform, cores and GPU, without importing a framework."""
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu_count": os.cpu_count(),
        "gpu": _gpu_name(),
        "versions": {package: version for package in _PACKAGES if (version := _version(package))},
    }


def write_result(name: str, figures: dict[str, Any]) -> pathlib.Path:
    """Writes benchmarks/results/NAME.json and prints it."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    text = json.dumps({"environment": environment(), **figures}, indent=2)
    path.write_text(text + "\n")
    print(text)
    return path


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _gpu_name() -> str | None:
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.strip() or None
