"""What a driver reads of a device's memory, on a fake one."""

from __future__ import annotations

import dataclasses

import pytest

from oomproof._backends.fake import FakeMemory
from oomproof._training.memory import Gauge
from oomproof.errors import BackendError


@dataclasses.dataclass
class CountingMemory(FakeMemory):
    released: int = 0

    def release(self):
        self.released += 1


def test_a_budget_is_the_limit_and_leaves_more_free():
    plain, budgeted = Gauge(FakeMemory(1000, 100), None), Gauge(FakeMemory(1000, 100), 600)
    assert (plain.limit, plain.free(), plain.taken()) == (1000, 900, 100)
    assert (budgeted.limit, budgeted.free(), budgeted.taken()) == (600, 500, 100)
    assert budgeted.headroom < plain.headroom < 1


def test_more_in_use_than_the_budget_leaves_nothing():
    gauge = Gauge(FakeMemory(1000, 700), 600)
    assert (gauge.free(), gauge.taken()) == (0, 700)


def test_the_peak_counts_from_the_beginning():
    memory = FakeMemory(1000, 100)
    gauge = Gauge(memory, None)
    memory.take(500, "step")
    assert gauge.begin() == 100
    memory.take(200, "step")
    assert gauge.end() == 300


def test_only_what_was_left_behind_is_collected():
    memory = CountingMemory(2**30)
    gauge = Gauge(memory, None)
    gauge.end()
    gauge.release()
    assert memory.released == 0
    memory.resident = 2**21
    gauge.release()
    assert memory.released == 1


def test_where_nothing_can_be_read_everything_is_collected():
    memory = CountingMemory(None, measurable=False)
    gauge = Gauge(memory, None)
    assert not gauge.measurable
    gauge.release()
    assert memory.released == 1


def test_a_budget_that_cannot_be_measured_is_refused():
    with pytest.raises(BackendError, match="600 B"):
        Gauge(FakeMemory(None, measurable=False), 600)
