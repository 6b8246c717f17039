"""Sizes that the user gave, sizes that settle, and what is tried once more, on a fake device."""

from __future__ import annotations

import pytest
from test_driver import BATCH, driver_on, kinds

from oomproof._backends.fake import FakeMemory, FakeShortageError, FakeStep
from oomproof._training.driver import Driver
from oomproof._training.settings import Settings
from oomproof.errors import RecoveryFailedError


def test_a_given_size_is_tried_as_it_was_said():
    """Neither a plan nor what small pieces say makes it smaller before it was tried."""
    asked = []
    settings = Settings(micro_batch_size=64, propose=lambda *given: asked.append(given))
    driver = driver_on(1000, slope=10, settings=settings)
    driver.step.probe(BATCH, 32, "train")
    driver.run("train", BATCH)
    assert [pieces for *_, pieces in driver.step.done] == [4]
    assert not asked
    assert not kinds(driver)


def test_a_given_size_that_fails_is_made_smaller():
    driver = driver_on(500, slope=10, settings=Settings(micro_batch_size=64))
    driver.run("train", BATCH)
    assert kinds(driver)[0][:2] == ("oom", 64)


def test_what_went_through_in_less_is_not_made_smaller():
    """With room to spare a step may take more than it needs: data is read ahead, ops run side by side."""
    driver = driver_on(2000, slope=10, settings=Settings(micro_batch_size=64))
    driver.run("train", BATCH)
    driver.step.slope = 20
    driver.run("train", BATCH)
    driver.step.slope = 10
    for epoch in range(1, 6):
        driver.memory.resident = 1300 if epoch % 2 else 0
        driver.begin_epoch(epoch)
        driver.run("train", BATCH)
    assert not kinds(driver)


def test_sizes_settle():
    """Memory that comes and goes by the epoch is believed once: smaller, larger, smaller, and that is it."""
    driver = driver_on(300, slope=1)
    for epoch in range(12):
        driver.memory.resident = 200 if epoch % 2 else 0
        driver.begin_epoch(epoch)
        driver.run("train", BATCH)
    assert [kind for kind, *_ in kinds(driver)] == ["shrink", "grow", "shrink"]
    assert driver.memory.failures == 0


def test_shrinking_and_growing_are_told_in_different_words(caplog):
    driver = driver_on(300, slope=1)
    for resident in (0, 200, 0):
        driver.memory.resident = resident
        driver.begin_epoch(0)
        driver.run("train", BATCH)
    told = [record.message for record in caplog.records]
    assert "in smaller pieces" in told[0]
    assert "no longer cut" in told[1]


class Passing(FakeStep):
    """The first run of whole pieces fails, whatever is free."""

    fails = 1

    def train(self, data, pieces, lean, spec=None):
        if self.fails:
            self.fails -= 1
            raise FakeShortageError("step")
        return super().train(data, pieces, lean, spec)


@pytest.mark.parametrize("fails", [1, 3])
def test_what_fits_with_ease_by_what_was_measured_is_tried_once_more(fails, caplog):
    memory = FakeMemory(10_000)
    driver = Driver(Passing(memory, slope=10), memory, Settings())
    driver.step.fails = fails
    driver.run("train", BATCH)
    assert kinds(driver)[0] == ("oom", 256, 256)
    assert "trying it once more" in caplog.records[0].message
    ((_, samples, pieces),) = driver.step.done
    assert samples == BATCH
    # Once for each size: after that it is made smaller.
    assert (pieces == 1) == (fails == 1)


def test_one_sample_is_tried_twice_with_all_memory_free():
    driver = driver_on(10_000, slope=100)
    real, tried = driver.step.probe, []

    def probe(data, samples, phase):
        tried.append(samples)
        if len(tried) == 1:
            raise FakeShortageError("step")
        real(data, samples, phase)

    driver.step.probe = probe
    driver.run("train", BATCH)
    assert tried[:2] == [1, 1]
    assert driver.step.done[0][1] == BATCH
    assert driver.step.done[0][2] < 10


@pytest.mark.parametrize("phase", ["train", "test", "predict"])
@pytest.mark.parametrize("fails", [1, 2])
def test_a_batch_of_one_sample_is_tried_twice_with_all_memory_free(phase, fails, caplog):
    driver = driver_on(10_000, slope=100)
    real, left = driver.step._gradients, [fails]

    def gradients(samples):
        if left[0]:
            left[0] -= 1
            raise FakeShortageError("step")
        real(samples)

    driver.step._gradients = gradients
    if fails == 1:
        driver.run(phase, BATCH[:1])
        assert driver.step.done == [(phase, BATCH[:1], 1)]
        assert not driver.training.current.lean
    elif phase == "train":
        driver.run(phase, BATCH[:1])
        assert driver.training.current.lean
    else:
        with pytest.raises(RecoveryFailedError, match="A piece of 1 of 1 samples does not fit"):
            driver.run(phase, BATCH[:1])
    assert "though 9.8 KiB are free: trying it once more" in caplog.records[0].message
