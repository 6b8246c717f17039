"""Runs the contestants side by side, each in a process with its own TensorFlow, and collects what they measured.

Side by side because TensorFlow waits 10 s on every failed request, and that wait is idle.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import time
from typing import Any

import numpy as np

from oomproof._demo.contestants import CONTESTANTS

# Several times what two idle cores take, for machines that are slower or busy.
DEADLINE_S = 300
_NO_LIMIT_MIB = 2**20


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What came of one contestant.

    Attributes:
        name: A key of `CONTESTANTS`.
        started: Whether TensorFlow started and the model was built.
        result: What the process measured, or `None` when it died without a word.
        end: How the process ended, when there is no result: `"killed"`, `"time up"` or `"exit code 1"`.
        last_words: More about that end.
        apart: Largest absolute difference of its final weights from the unlimited run's, when both finished.
    """

    name: str
    started: bool
    result: dict[str, Any] | None
    end: str = ""
    last_words: str = ""
    apart: float | None = None

    @property
    def finished(self) -> bool:
        return self.result is not None and bool(self.result["finished"])


def compare(limit_mib: int, batch_size: int) -> dict[str, Outcome]:
    """Trains with every contestant at once; `unlimited` has no limit, the others have `limit_mib`."""
    with tempfile.TemporaryDirectory(prefix="oomproof-demo-") as name:
        folder = pathlib.Path(name)
        children: dict[str, subprocess.Popen[bytes]] = {}
        try:
            for contestant in CONTESTANTS:
                limit = _NO_LIMIT_MIB if contestant == "unlimited" else limit_mib
                children[contestant] = _start(contestant, batch_size, folder, limit)
            deadline = time.monotonic() + DEADLINE_S
            exit_codes = {contestant: _wait(child, deadline) for contestant, child in children.items()}
        finally:
            for child in children.values():
                child.kill()
                child.wait()
        return {contestant: _collect(contestant, folder, code) for contestant, code in exit_codes.items()}


def _start(contestant: str, batch_size: int, folder: pathlib.Path, limit_mib: int) -> subprocess.Popen[bytes]:
    environment = os.environ | {
        "KERAS_BACKEND": "tensorflow",
        "CUDA_VISIBLE_DEVICES": "-1",
        # The CPU device takes the allocator that GPUs use, with a hard limit. With oneDNN a shortage is a crash.
        "TF_CPU_ALLOCATOR_USE_BFC": "true",
        "TF_CPU_BFC_MEM_LIMIT_IN_MB": str(limit_mib),
        "TF_ENABLE_ONEDNN_OPTS": "0",
        # The log is for the last words of a process that dies, so keep it to errors.
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "PYTHONWARNINGS": "ignore",
        # One thread an operation: four processes share the cores, and sums come in the same order every time.
        "TF_NUM_INTRAOP_THREADS": "1",
    }
    command = [sys.executable, "-P", "-m", "oomproof._demo.contestants", contestant, str(batch_size), str(folder)]
    with (folder / f"{contestant}.log").open("wb") as log:
        return subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log)


def _wait(child: subprocess.Popen[bytes], deadline: float) -> int | None:
    """Waits for the exit code, or until the deadline."""
    try:
        return child.wait(timeout=max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        return None


def _collect(contestant: str, folder: pathlib.Path, exit_code: int | None) -> Outcome:
    started = (folder / f"{contestant}.started").exists()
    report = folder / f"{contestant}.json"
    if report.exists():
        outcome = Outcome(contestant, started, json.loads(report.read_text()))
        apart = _largest_difference(folder, contestant) if outcome.finished else None
        return dataclasses.replace(outcome, apart=apart)
    if exit_code is None:
        advice = f"after {DEADLINE_S} s. TensorFlow waits 10 s whenever memory is short; try a larger --limit."
        return Outcome(contestant, started, None, "time up", advice)
    last_line = _last_line(folder / f"{contestant}.log")
    if exit_code < 0:
        return Outcome(contestant, started, None, "killed", f"by {signal.Signals(-exit_code).name}. {last_line}")
    return Outcome(contestant, started, None, f"exit code {exit_code}", last_line)


def _last_line(log: pathlib.Path) -> str:
    """The last line that is not one of TensorFlow's remarks about the machine, such as `I0000 00:00:17… no CUDA`."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines()]
    return next((line for line in reversed(lines) if line and not re.match(r"[IWE]\d{4} ", line)), "")


def _largest_difference(folder: pathlib.Path, contestant: str) -> float | None:
    if not (folder / "unlimited.npz").exists():
        return None
    with np.load(folder / f"{contestant}.npz") as ours, np.load(folder / "unlimited.npz") as theirs:
        return max(float(np.abs(ours[name] - theirs[name]).max()) for name in ours)
