"""The record of an audit, host memory, and what the command line says to bad input. No framework."""

import os
import pathlib
import subprocess
import sys

import pytest

import oomproof
from oomproof._machine import host
from oomproof._records.diagnosis import Finding
from oomproof.data import DataAudit, Stage

GOLDEN = pathlib.Path(__file__).parent / "golden"
MIB, GIB = 2**20, 2**30
AUDIT = DataAudit(
    kind="tf.data",
    stages=(
        Stage("from_tensor_slices", 600 * MIB, "tensors held by the pipeline", 49152, 12800),
        Stage("scan", None, "a stage that oomproof does not know"),
        Stage("shuffle(1000)", 47 * MIB, "a buffer of elements of 48 KiB", 49152, 12800),
        Stage("batch(64)", 6 * MIB, "", 3 * MIB, 200),
    ),
    host_bytes=653 * MIB,
    device_bytes=3 * MIB,
    bound_bytes=2 * GIB,
    available=8 * GIB,
    findings=(Finding("warning", "no prefetch", "No prefetch at the end.", "dataset.prefetch(2)"),),
)


def test_prints_itself():
    assert str(AUDIT) + "\n" == (GOLDEN / "data_audit.txt").read_text()


def test_json_and_back():
    assert DataAudit.from_json(AUDIT.to_json()) == AUDIT
    assert AUDIT.to_dict()["unknown"] == ["scan"]


def test_public_names():
    assert oomproof.data.DataAudit is DataAudit
    assert callable(oomproof.data.audit)
    assert callable(oomproof.data.tune)
    assert set(dir(oomproof.data)) >= {"audit", "tune"}
    with pytest.raises(AttributeError):
        oomproof.data.nothing  # noqa: B018


def machine(root, **files):
    for name, text in files.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


MEMINFO = "MemTotal: 16777216 kB\nMemAvailable: 8388608 kB\n"


def test_memory_of_a_machine(tmp_path):
    root = machine(tmp_path, proc__meminfo=MEMINFO)
    assert (host.total(root), host.available(root)) == (16 * GIB, 8 * GIB)


def test_a_control_group_is_a_machine(tmp_path):
    files = {"proc__self__cgroup": "0::/\n", "sys__fs__cgroup__memory.max": f"{4 * GIB}\n"}
    root = machine(tmp_path, proc__meminfo=MEMINFO, **files, **{"sys__fs__cgroup__memory.current": f"{3 * GIB}\n"})
    assert (host.total(root), host.available(root)) == (4 * GIB, GIB)


def test_nothing_to_read(tmp_path):
    assert (host.total(tmp_path), host.available(tmp_path), host.resident(tmp_path)) == (None, None, None)


def test_resident_memory_of_a_family(tmp_path):
    root = machine(
        tmp_path,
        proc__7__status="VmRSS:\t 1024 kB\n",
        proc__7__smaps_rollup="Pss:  900 kB\n",
        proc__7__task__7__children="8 9",
        proc__8__status="VmRSS:\t 512 kB\n",
        proc__8__smaps_rollup="Pss:  100 kB\n",
        proc__9__status="VmRSS:\t 512 kB\n",
    )
    assert host.resident(root, 8) == 512 * 1024
    assert host.resident(root, 7) == (900 + 100 + 512) * 1024


@pytest.mark.skipif(sys.platform != "linux", reason="/proc takes Linux")
def test_resident_memory_of_this_process():
    before = host.resident()
    block = bytearray(os.urandom(1)) * (64 * MIB)
    grown = host.resident() - before
    assert 60 * MIB < grown < 70 * MIB
    del block


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nothing_here:make"], "There is no module 'nothing_here'"),
        (["json:nothing"], "has no function 'nothing'"),
        (["json"], "Expected a function as module:function"),
        (["json:loads"], "json:loads failed"),
        (["os:getcwd"], "Expected a tf.data.Dataset"),
        (["os:getcwd", "--batch-size", "none"], "Expected batch sizes of at least 1"),
        (["os:getcwd", "--backend", "theano"], "Expected a backend"),
    ],
)
def test_bad_input_on_the_command_line(arguments, words):
    command = [sys.executable, "-c", "from oomproof._cli.main import main; main()", "data", "audit", *arguments]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert answer.returncode == 2, answer.stderr
    assert words in answer.stderr
    assert "Traceback" not in answer.stderr
