"""Failures that need no framework, produced for real in child processes and explained from what they print."""

import os
import signal
import subprocess
import sys

import pytest

import oomproof

if sys.platform == "win32":
    pytest.skip("limits of a process are a matter of Unix", allow_module_level=True)

import resource

GIB = 2**30


def limited(which: int, size: int):
    return lambda: resource.setrlimit(which, (size, size))


def output(code: str, limit=None) -> bytes:
    answer = subprocess.run(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        preexec_fn=limit,
        timeout=60,
        check=False,
        # Libraries of NumPy take address space for each thread.
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
    )
    return answer.stdout


def test_numpy() -> None:
    code = "import numpy; numpy.ones((1000, 1024, 1024, 64))"
    found = oomproof.explain(output(code, limited(resource.RLIMIT_AS, 4 * GIB)))
    assert (found.memory, found.cause, found.raised_by) == ("host", "host-ram", "python")
    assert (found.requested_bytes, found.tensor_shape) == (500 * GIB, (1000, 1024, 1024, 64))
    assert found.dtype == "float64"


def test_python() -> None:
    found = oomproof.explain(output("bytearray(2**34)", limited(resource.RLIMIT_AS, GIB)))
    assert (found.memory, found.cause, found.raised_by) == ("host", "host-ram", "python")


def test_no_memory_for_a_mapping() -> None:
    found = oomproof.explain(output("import mmap; mmap.mmap(-1, 2**36)", limited(resource.RLIMIT_AS, GIB)))
    assert (found.memory, found.cause) == ("host", "host-ram")


def test_killed() -> None:
    line = f"{sys.executable} -c 'import os; os.kill(os.getpid(), 9)'; true"
    answer = subprocess.run(["bash", "-c", line], capture_output=True, timeout=60, check=True)
    found = oomproof.explain(answer.stderr)
    assert (found.memory, found.raised_by) == ("host", "kernel")


def test_killed_seen_from_python() -> None:
    with pytest.raises(subprocess.CalledProcessError) as caught:
        subprocess.run([sys.executable, "-c", f"import os; os.kill(os.getpid(), {int(signal.SIGKILL)})"], check=True)
    assert oomproof.explain(caught.value).raised_by == "kernel"


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="a matter of Linux")
def test_a_full_disk_is_not_memory() -> None:
    found = oomproof.explain(output("open('/dev/full', 'w').write('x' * 100_000)"))
    assert (found.is_memory, found.cause) == (False, "not-memory")
    assert "disk" in found.summary


def test_open_files_are_not_memory() -> None:
    code = "files = [open('/dev/null') for _ in range(100)]"
    found = oomproof.explain(output(code, limited(resource.RLIMIT_NOFILE, 32)))
    assert (found.is_memory, found.cause) == (False, "not-memory")
    assert "files" in found.summary
