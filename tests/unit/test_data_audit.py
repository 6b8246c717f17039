"""The record of an audit, host memory, and what the command line says to bad input. No framework."""

import os
import pathlib
import signal
import subprocess
import sys
import types

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


@pytest.fixture
def ram(monkeypatch):
    memory = types.SimpleNamespace(total=16 * GIB, available=8 * GIB)
    monkeypatch.setattr(host.psutil, "virtual_memory", lambda: memory)
    monkeypatch.setattr(host, "cgroup_limits", lambda: (None, None))


def test_memory_of_a_machine(ram):
    assert (host.total(), host.available()) == (16 * GIB, 8 * GIB)


def test_a_control_group_is_a_machine(ram, monkeypatch):
    monkeypatch.setattr(host, "cgroup_limits", lambda: (4 * GIB, 3 * GIB))
    assert (host.total(), host.available()) == (4 * GIB, GIB)


def test_nothing_to_read(monkeypatch):
    def unreadable(*_):
        raise PermissionError

    monkeypatch.setattr(host, "cgroup_limits", lambda: (None, None))
    for name in ("virtual_memory", "swap_memory"):
        monkeypatch.setattr(host.psutil, name, unreadable)
    monkeypatch.setattr(host, "_process", unreadable)
    assert (host.total(), host.available(), host.resident(), host.swap()) == (None, None, None, None)


@pytest.fixture(scope="module")
def family():
    """A process that holds 64 MiB and has a child, which shares them."""
    code = (
        "import os, sys, time\nblock = os.urandom(1) * (64 * 2**20)\n"
        "if os.fork():\n    print('there', flush=True)\ntime.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, start_new_session=True)
    process.stdout.readline()
    yield process.pid
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@pytest.mark.skipif(sys.platform != "linux", reason="shared pages are told apart on Linux")
@pytest.mark.parametrize("listed", [True, False])
def test_what_a_family_shares_counts_once(family, listed, monkeypatch):
    monkeypatch.setattr(host, "_kernel_lists_children", lambda: listed)
    assert len(host._family(family)) == 2
    assert 64 * MIB < host.resident(family) < 110 * MIB


@pytest.mark.skipif(sys.platform != "linux", reason="a fork shares its pages there")
def test_each_counts_in_full_where_nothing_is_said_of_sharing(family, monkeypatch):
    monkeypatch.setattr(host, "_proportional", lambda process: 0)
    assert host.resident(family) > 128 * MIB


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
