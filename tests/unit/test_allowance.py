"""What a driver reads of a device's memory, on a fake one."""

from __future__ import annotations

import dataclasses

import pytest

from oomproof._backends.fake import FakeMemory
from oomproof._training.allowance import Allowance
from oomproof.errors import BackendError


@dataclasses.dataclass
class CountingMemory(FakeMemory):
    released: int = 0

    def release(self):
        self.released += 1


def test_a_budget_is_the_limit_and_leaves_more_free_on_a_cpu():
    class Cpu(FakeMemory):
        def describe(self):
            return dataclasses.replace(super().describe(), name="CPU:0")

    plain, budgeted = Allowance(Cpu(1000, 100), None), Allowance(Cpu(1000, 100), 600)
    assert (plain.limit, plain.free(), plain.taken()) == (1000, 900, 100)
    assert (budgeted.limit, budgeted.free(), budgeted.taken()) == (600, 500, 100)
    assert budgeted.headroom < plain.headroom < 1
    assert Allowance(FakeMemory(1000, 100), 600).headroom == plain.headroom


def test_more_in_use_than_the_budget_leaves_nothing():
    allowance = Allowance(FakeMemory(1000, 700), 600)
    assert (allowance.free(), allowance.taken()) == (0, 700)


def test_the_peak_counts_from_the_beginning():
    memory = FakeMemory(1000, 100)
    allowance = Allowance(memory, None)
    memory.take(500, "step")
    assert allowance.watch() == 100
    memory.take(200, "step")
    assert allowance.peak() == 300


def test_only_what_was_left_behind_is_collected():
    memory = CountingMemory(2**30)
    allowance = Allowance(memory, None)
    allowance.peak()
    allowance.release()
    assert memory.released == 0
    memory.resident = 2**21
    allowance.release()
    assert memory.released == 1


def test_where_nothing_can_be_read_everything_is_collected():
    memory = CountingMemory(None, measurable=False)
    allowance = Allowance(memory, None)
    assert not allowance.measurable
    allowance.release()
    assert memory.released == 1


def test_a_budget_that_cannot_be_measured_is_refused():
    with pytest.raises(BackendError, match="600 B"):
        Allowance(FakeMemory(None, measurable=False), 600)
