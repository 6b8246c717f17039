"""What a run keeps of the host: the most it held, and one word before the kernel has it."""

from __future__ import annotations

import pytest

from oomproof._machine import host
from oomproof._records.plan import Plan
from oomproof._records.run import Device
from oomproof._training import run_log
from oomproof._training.run_log import RunLog

GIB = 2**30


@pytest.fixture
def machine(monkeypatch):
    """A host of 16 GiB that tests can fill, and a clock they can put forward."""
    state = {"resident": 2 * GIB, "available": 12 * GIB, "total": 16 * GIB, "now": 100.0, "looks": 0}

    def resident():
        state["looks"] += 1
        return state["resident"]

    monkeypatch.setattr(host, "resident", resident)
    monkeypatch.setattr(host, "available", lambda: state["available"])
    monkeypatch.setattr(host, "total", lambda: state["total"])
    monkeypatch.setattr(run_log.time, "perf_counter", lambda: state["now"])
    return state


def recorded(kept):
    return kept.record("fake", {}, Device("GPU:0", None, False), None, Plan())


def test_the_most_that_was_held_is_in_the_run(machine):
    kept = RunLog()
    for held in (2, 5, 3):
        machine["resident"] = held * GIB
        kept.finished("train", 64)
        machine["now"] += 5
    assert recorded(kept).host_peak == 5 * GIB
    assert recorded(kept).steps == {"train": 3, "test": 0, "predict": 0}
    assert recorded(kept).events == ()


def test_the_host_is_not_read_after_every_step(machine):
    kept = RunLog()
    for _ in range(1000):
        kept.finished("train", 64)
        machine["now"] += 0.01
    assert 10 <= machine["looks"] <= 11


def test_a_host_that_is_nearly_full_is_said_once_with_its_numbers(machine):
    kept = RunLog()
    for left in (6, 0.5, 0.4):
        machine["available"] = int(left * GIB)
        machine["resident"] = 13 * GIB
        kept.finished("train", 64)
        machine["now"] += 5
    (event,) = recorded(kept).events
    assert (event.kind, event.free) == ("note", GIB // 2)
    for said in ("512 MiB of 16.0 GiB left", "13.0 GiB held by this process", "oomproof.data.audit"):
        assert said in event.message


def test_a_host_that_does_not_tell_is_no_trouble(machine):
    machine.update(resident=None, available=None, total=None)
    kept = RunLog()
    kept.finished("train", 64)
    assert recorded(kept).host_peak is None
    assert recorded(kept).events == ()
