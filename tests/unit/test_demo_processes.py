"""A process of the demo that dies, hangs or says nothing never takes the demo with it."""

from __future__ import annotations

import pathlib
import subprocess
import sys
import time

import pytest

from oomproof._demo import processes

CODE = {
    "unlimited": "import time; time.sleep(60)",
    "plain": "import os, signal; print('I0000 00:00:17 remark'); os.kill(os.getpid(), signal.SIGKILL)",
    "halving": "import sys; print('last words'); print('W0000 00:00:17 remark'); sys.exit(3)",
    "oomproof": "pass",
}


def test_every_end_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    children = []

    def start(contestant: str, batch_size: int, folder: pathlib.Path, limit_mib: int) -> subprocess.Popen[bytes]:
        with (folder / f"{contestant}.log").open("wb") as log:
            children.append(subprocess.Popen([sys.executable, "-c", CODE[contestant]], stdout=log, stderr=log))
        return children[-1]

    monkeypatch.setattr(processes, "_start", start)
    monkeypatch.setattr(processes, "DEADLINE_S", 3)
    began = time.monotonic()
    outcomes = processes.compare(limit_mib=1, batch_size=1)
    assert time.monotonic() - began < 30
    assert all(child.poll() is not None for child in children)
    assert {name: outcome.end for name, outcome in outcomes.items()} == {
        "unlimited": "time up",
        "plain": "killed",
        "halving": "exit code 3",
        "oomproof": "exit code 0",
    }
    assert outcomes["plain"].last_words == "by SIGKILL. "
    assert outcomes["halving"].last_words == "last words"
    assert not any(outcome.finished for outcome in outcomes.values())
