"""doctor, against machines that are described to it."""

import dataclasses
import pathlib
import types

import pytest

from oomproof._doctor.checks import check
from oomproof._doctor.machine import Card, Machine, Process, this_machine
from oomproof._machine import host
from oomproof._machine.host import cgroup_limits
from oomproof._records.diagnosis import Checkup

GOLDEN = pathlib.Path(__file__).parent / "golden"
GIB = 2**30
PACKAGES = {"keras": "3.15.1", "tensorflow": "2.21.0", "nvidia-cudnn-cu12": "9.10.0", "numpy": "2.4.6"}
GOOD = Machine(
    cards=(Card("NVIDIA H200", 140 * GIB, 139 * GIB),),
    environment={"TF_FORCE_GPU_ALLOW_GROWTH": "true"},
    packages=PACKAGES,
    memory=256 * GIB,
    available=200 * GIB,
    swap=0,
    shm=(64 * GIB, 64 * GIB),
    open_files=65536,
    gpu_hardware=True,
    pid=1,
)


def found(machine: Machine, topic: str, **changes):
    """Findings about a topic that are not "ok"."""
    checkup = check(dataclasses.replace(machine, **changes))
    return [finding for finding in checkup.findings if finding.topic == topic and finding.severity != "ok"]


def test_a_good_machine() -> None:
    checkup = check(GOOD)
    assert checkup.worst == "ok"
    assert str(checkup) + "\n" == (GOLDEN / "doctor_good.txt").read_text()


BAD = dataclasses.replace(
    GOOD,
    cards=(
        Card("NVIDIA T4", 15 * GIB, 2 * GIB, (Process(77, 12 * GIB, "python"), Process(78, None))),
        Card("NVIDIA T4", 15 * GIB, 12 * GIB),
    ),
    environment={"TF_FORCE_GPU_ALOW_GROWTH": "true", "KERAS_BACKEND": "jax", "XLA_PYTHON_CLIENT_MEM_FRACTION": "90%"},
    packages={**PACKAGES, "torch": "2.13.0+cpu", "jax": "0.10.2", "jaxlib": "0.9.0"},
    memory=12 * GIB,
    available=1 * GIB,
    cgroup_limit=8 * GIB,
    cgroup_used=int(7.5 * GIB),
    shm=(64 * 2**20, 60 * 2**20),
    open_files=1024,
)


def test_a_bad_machine() -> None:
    checkup = check(BAD)
    assert checkup.worst == "problem"
    assert str(checkup) + "\n" == (GOLDEN / "doctor_bad.txt").read_text()
    assert all(finding.fix for finding in checkup.findings if finding.severity in ("warning", "problem"))


def test_to_json_and_back() -> None:
    checkup = check(BAD)
    assert Checkup.from_json(checkup.to_json()) == checkup


def test_who_holds_a_card() -> None:
    (held, other) = found(BAD, "devices")
    assert held.severity == "problem"
    assert "process 77 python (12.0 GiB)" in held.text
    assert "CUDA_VISIBLE_DEVICES=1" in held.fix
    assert other.severity == "warning"
    assert "not visible here" in other.text


def test_no_gpu_and_a_driver_that_does_not_answer() -> None:
    assert found(GOOD, "devices", cards=(), gpu_hardware=False)[0].severity == "note"
    (lost,) = found(GOOD, "devices", cards=(), driver="Driver/library version mismatch")
    assert lost.severity == "problem"
    assert "mismatch" in lost.text


@pytest.mark.parametrize(
    ("packages", "text"),
    [
        ({"keras": "3.10.0"}, "keras 3.10.0 is older"),
        ({"tensorflow": "2.15.1", "numpy": "2.0.0"}, "built for NumPy 1"),
        ({"jax": "0.10.2", "jaxlib": "0.9.0"}, "not from the same release"),
        ({"jaxlib": "0.10.2", "jax-cuda12-plugin": "0.9.1"}, "falls back to the CPU"),
        ({"tensorflow": "2.21.0", "tensorflow-cpu": "2.21.0"}, "either may run"),
    ],
)
def test_versions_that_clash(packages: dict[str, str], text: str) -> None:
    assert any(text in finding.text for finding in found(GOOD, "versions", packages=packages))


@pytest.mark.parametrize(
    ("packages", "text"),
    [
        ({**PACKAGES, "torch": "2.13.0+cpu"}, "built for CPUs only"),
        ({**PACKAGES, "jax": "0.10.2"}, "without a CUDA plugin"),
        ({"tensorflow-cpu": "2.21.0"}, "tensorflow-cpu is installed"),
        ({"tensorflow": "2.21.0"}, "without its CUDA packages"),
    ],
)
def test_builds_for_cpus_on_a_machine_with_a_gpu(packages: dict[str, str], text: str) -> None:
    assert any(text in finding.text for finding in found(GOOD, "builds", packages=packages))
    assert not found(GOOD, "builds", packages=packages, cards=(), gpu_hardware=False)


@pytest.mark.parametrize("backend", ["jax", "torch", "openvino"])
def test_a_backend_that_is_not_there(backend: str) -> None:
    (finding,) = found(GOOD, "backend", environment={"KERAS_BACKEND": backend})
    assert finding.severity == "problem"
    assert "KERAS_BACKEND=tensorflow" in finding.fix
    assert found(GOOD, "backend", environment={}, keras_config={"backend": "jax"})


@pytest.mark.parametrize(
    ("environment", "topic", "text"),
    [
        ({"PYTORCH_CUDA_ALOC_CONF": "x"}, "settings", "Did you mean PYTORCH_CUDA_ALLOC_CONF?"),
        ({"XLA_PYTHON_CLIENT_PREALOCATE": "false"}, "settings", "Did you mean XLA_PYTHON_CLIENT_PREALLOCATE?"),
        ({"PYTORCH_ALLOC_CONF": "a", "PYTORCH_CUDA_ALLOC_CONF": "b"}, "settings", "both set"),
        ({"CUDA_VISIBLE_DEVICES": ""}, "settings", "hides every card"),
        ({"XLA_PYTHON_CLIENT_ALLOCATOR": "platform"}, "preallocation", "slow"),
        ({"XLA_PYTHON_CLIENT_MEM_FRACTION": "90%"}, "preallocation", "not a number between 0 and 1"),
        ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True,max_split_size_mb:128"}, "settings", "has no effect"),
        ({"TF_CPU_BFC_MEM_LIMIT_IN_MB": "500"}, "settings", "ends the process"),
    ],
)
def test_settings(environment: dict[str, str], topic: str, text: str) -> None:
    assert any(text in finding.text for finding in found(GOOD, topic, environment=environment))


def test_other_variables_are_left_alone() -> None:
    assert not found(GOOD, "settings", environment={"TF_CPP_MAX_VLOG_LEVEL": "1", "PYTORCH_JIT": "0", "HOME": "/root"})


def test_what_is_said_is_safe_to_print() -> None:
    text = str(check(dataclasses.replace(GOOD, environment={"XLA_FLAGS": "\x1b[2J\n--x"})))
    assert "\x1b" not in text


# Where a machine is read from


def write(path: pathlib.Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_cgroups_of_version_2(tmp_path: pathlib.Path) -> None:
    for path, text in {
        "proc/self/cgroup": "0::/user/job\n",
        "sys/fs/cgroup/user/memory.max": f"{4 * GIB}\n",
        "sys/fs/cgroup/user/memory.current": f"{GIB}\n",
        "sys/fs/cgroup/user/job/memory.max": "max\n",
    }.items():
        write(tmp_path / path, text)
    assert cgroup_limits(tmp_path) == (4 * GIB, GIB)


def test_cgroups_of_version_1(tmp_path: pathlib.Path) -> None:
    for path, text in {
        "proc/self/cgroup": "12:pids:/docker/abc\n4:memory:/docker/abc\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{2 * GIB}\n",
        "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{GIB}\n",
    }.items():
        write(tmp_path / path, text)
    assert cgroup_limits(tmp_path) == (2 * GIB, GIB)


@pytest.mark.parametrize("limit", ["9223372036854771712", "max", "", "many"])
def test_no_limit(tmp_path: pathlib.Path, limit: str) -> None:
    folder = tmp_path / "sys/fs/cgroup"
    folder.mkdir(parents=True)
    (folder / "memory.max").write_text(limit)
    assert cgroup_limits(tmp_path) == (None, None)


def nvml(count: int = 1, fails_at: str = "") -> types.SimpleNamespace:
    class NVMLError(Exception):
        pass

    def answer(name: str, value):
        def call(*_):
            if name == fails_at:
                raise NVMLError(f"{name} failed")
            return value

        return call

    processes = [types.SimpleNamespace(pid=2**22 + 77, usedGpuMemory=12 * GIB)]
    return types.SimpleNamespace(
        NVMLError=NVMLError,
        nvmlInit=answer("init", None),
        nvmlShutdown=answer("shutdown", None),
        nvmlSystemGetDriverVersion=answer("driver", b"570.1"),
        nvmlDeviceGetCount=answer("count", count),
        nvmlDeviceGetHandleByIndex=answer("handle", object()),
        nvmlDeviceGetName=answer("name", "NVIDIA T4"),
        nvmlDeviceGetMemoryInfo=answer("memory", types.SimpleNamespace(total=15 * GIB, free=3 * GIB)),
        nvmlDeviceGetComputeRunningProcesses=answer("processes", processes),
    )


def test_a_machine_is_read(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "machine_memory", lambda: (16 * GIB, 8 * GIB))
    monkeypatch.setattr(host, "swap", lambda: 0)
    (tmp_path / "dev/shm").mkdir(parents=True)
    machine = this_machine(tmp_path, {}, nvml(2))
    assert (machine.memory, machine.available, machine.swap) == (16 * GIB, 8 * GIB, 0)
    assert machine.cards[1] == Card("NVIDIA T4", 15 * GIB, 3 * GIB, (Process(2**22 + 77, 12 * GIB, ""),))
    assert machine.driver == "570.1"
    assert machine.shm is not None
    assert "numpy" in machine.packages
    assert check(machine).worst == "problem"


@pytest.mark.parametrize("fails_at", ["init", "count", "memory"])
def test_a_driver_that_fails(tmp_path: pathlib.Path, fails_at: str) -> None:
    machine = this_machine(tmp_path, {}, nvml(fails_at=fails_at))
    assert machine.cards == ()
    assert "failed" in machine.driver


def test_processes_that_cannot_be_seen(tmp_path: pathlib.Path) -> None:
    assert this_machine(tmp_path, {}, nvml(fails_at="processes")).cards[0].processes == ()
