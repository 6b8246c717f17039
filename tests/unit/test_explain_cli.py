"""`oomproof explain` and `oomproof doctor`, as they are called."""

import json
import subprocess
import sys

import pytest
from explain_texts import BY_CAUSE

COMMAND = [sys.executable, "-c", "from oomproof._cli.main import main; main()"]


def run(*arguments: str, given: bytes = b"") -> subprocess.CompletedProcess:
    return subprocess.run([*COMMAND, *arguments], input=given, capture_output=True, timeout=60, check=False)


def test_a_file(tmp_path) -> None:
    log = tmp_path / "train.log"
    log.write_text(BY_CAUSE["steady-exhaustion"])
    answer = run("explain", str(log))
    assert answer.returncode == 0
    assert b"steady-exhaustion" in answer.stdout


def test_standard_input_as_json() -> None:
    answer = run("explain", "-", "--json", given=BY_CAUSE["host-ram"].encode())
    assert answer.returncode == 0
    assert json.loads(answer.stdout)["cause"] == "host-ram"


@pytest.mark.parametrize("given", [BY_CAUSE["not-memory"].encode(), b"", b"\x00\xff[red]\x1b[2J"])
def test_no_memory_failure(given: bytes) -> None:
    answer = run("explain", "-", given=given)
    assert answer.returncode == 4
    assert b"\x1b" not in answer.stdout


@pytest.mark.parametrize("name", ["nowhere.log", "."])
def test_a_file_that_cannot_be_read(name: str) -> None:
    answer = run("explain", name)
    assert answer.returncode == 2
    assert b"Expected a log" in answer.stderr
    assert b"Traceback" not in answer.stderr


def test_markup_in_a_log_is_text() -> None:
    answer = run("explain", "-", given=b"[bold red]MemoryError: [/]$(id)\n")
    assert b"[bold red]MemoryError: [/]$(id)" in answer.stdout


def test_doctor() -> None:
    answer = run("doctor", "--json")
    found = json.loads(answer.stdout)
    assert {"devices", "host memory", "versions"} <= {finding["topic"] for finding in found["findings"]}
    assert answer.returncode == (3 if found["worst"] == "problem" else 0)


def test_neither_loads_a_framework() -> None:
    code = (
        "import sys, oomproof\nfrom oomproof._doctor.checks import check\noomproof.explain('MemoryError'); check()\n"
        "print(*{'tensorflow', 'keras', 'jax', 'torch'}.intersection(sys.modules))"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert answer.stdout.strip() == ""
