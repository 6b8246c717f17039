"""The driver on a fake device: what is tried, in which order, and when it stops. No framework, no waiting."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oomproof._backends.fake import FakeMemory, FakeShortageError, FakeStep
from oomproof._records.exactness import Exactness
from oomproof._training.driver import Driver
from oomproof._training.settings import Settings
from oomproof.errors import BackendError, CannotFitError, InexactWarning, RecoveryFailedError

BATCH = list(range(256))


def driver_on(limit, *, resident=0, measurable=True, settings=None, **step):
    memory = FakeMemory(limit, resident, measurable)
    driver = Driver(FakeStep(memory, **step), memory, settings or Settings())
    driver.begin()
    driver.begin_epoch(0)
    return driver


def run_of(driver):
    return driver.record("fake", {})


def kinds(driver):
    return [(event.kind, event.before, event.after) for event in run_of(driver).events]


def test_a_batch_that_fits_runs_whole_and_says_nothing(caplog):
    driver = driver_on(10_000, slope=10)
    assert driver.run("train", BATCH) == {"loss": 0.0}
    assert driver.step.done == [("train", BATCH, 1)]
    assert not kinds(driver)
    assert not caplog.records
    assert driver.plan.micro_batch_size is None


@pytest.mark.parametrize("phase", ["train", "test", "predict"])
@given(fixed=st.integers(0, 2000), slope=st.integers(1, 200), limit=st.integers(2500, 40_000))
def test_every_sample_is_run_exactly_once_or_it_is_said_why_not(phase, fixed, slope, limit):
    driver = driver_on(limit, fixed=fixed, slope=slope)
    assert fixed + slope <= limit  # One sample always fits here.
    driver.run(phase, BATCH)
    assert [samples for _, samples, _ in driver.step.done] == [BATCH]
    run = run_of(driver)
    assert run.steps[phase] == 1
    assert run.peak <= limit
    sizes = [event.after for event in run.events if event.kind == "oom"]
    assert sizes == sorted(sizes, reverse=True)
    assert len(set(sizes)) == len(sizes)


@pytest.mark.parametrize("fixed_share", [0.0, 0.1, 0.3, 0.6])
@pytest.mark.parametrize("fits", [10, 20, 40, 100, 200, 255])
def test_from_cold_one_failure_and_most_of_what_is_possible(fixed_share, fits):
    slope = 1000
    limit = int(slope * fits / (1 - fixed_share))
    driver = driver_on(limit, fixed=limit - slope * fits, slope=slope)
    driver.run("train", BATCH)
    assert driver.memory.failures <= 2
    reached = -(-256 // driver.step.done[0][2])
    # Of the sizes there are (256 over a whole number of pieces), the best one below what fits.
    possible = max(-(-256 // k) for k in range(1, 257) if -(-256 // k) <= fits)
    assert reached >= 0.7 * possible


def test_a_device_that_cannot_be_measured_is_halved():
    driver = driver_on(100, measurable=False, slope=1)
    driver.run("train", BATCH)
    assert kinds(driver) == [("oom", 256, 128), ("oom", 128, 64)]


def test_a_failure_that_can_be_foreseen_does_not_happen():
    driver = driver_on(300, slope=1)
    driver.run("train", BATCH)
    driver.memory.resident = 200
    driver.run("train", BATCH)
    assert driver.memory.failures == 0
    assert [kind for kind, *_ in kinds(driver)] == ["shrink"]
    assert driver.step.done[1][2] > 1


def test_it_grows_again_once_an_epoch_and_only_with_room():
    driver = driver_on(300, slope=1)
    driver.run("train", BATCH)
    driver.memory.resident = 200
    driver.run("train", BATCH)
    driver.memory.resident = 0
    driver.run("train", BATCH)
    assert driver.step.done[-1][2] > 1  # Not within the epoch.
    driver.begin_epoch(1)
    driver.run("train", BATCH)
    assert driver.step.done[-1][2] == 1
    assert [kind for kind, *_ in kinds(driver)] == ["shrink", "grow"]


def test_it_does_not_oscillate():
    """Needs that no line describes: the size settles, and epochs do not bring failures back."""
    driver = driver_on(300, slope=1)
    real = driver.step._gradients
    # Worse than linear above 100: every prediction from below is too hopeful.
    driver.step._gradients = lambda samples: real(samples if samples <= 100 else 4 * samples)
    for epoch in range(20):
        driver.begin_epoch(epoch)
        driver.run("train", BATCH)
    assert driver.memory.failures <= 4
    assert len({pieces for *_, pieces in driver.step.done[-10:]}) == 1


def test_a_failed_commit_goes_lean_and_never_smaller():
    driver = driver_on(1000, slope=1, update=1500)
    driver.run("train", BATCH)
    assert kinds(driver) == [("commit-oom", 256, 256)]
    assert driver.plan.lean_commit
    assert driver.step.done == [("train", BATCH, 1)]


def test_a_lean_commit_that_fails_gives_up_and_never_goes_smaller():
    driver = driver_on(1000, slope=1, update=9000)
    with pytest.raises(RecoveryFailedError, match="update does not fit") as caught:
        driver.run("train", BATCH)
    assert isinstance(caught.value.__cause__, FakeShortageError)
    assert driver.memory.failures == 2
    assert not driver.step.done
    assert kinds(driver) == [("commit-oom", 256, 256), ("oom", 256, None)]


@pytest.mark.parametrize("phase", ["train", "test", "predict"])
def test_one_sample_that_does_not_fit_is_found_out_soon(phase):
    """Each failure costs ten seconds: when one sample has failed there is no point in halving down to it."""
    driver = driver_on(100, fixed=150)
    with pytest.raises(RecoveryFailedError, match="1 of 256 samples does not fit") as caught:
        driver.run(phase, BATCH)
    assert isinstance(caught.value.__cause__, FakeShortageError)
    assert "Resident: weights" in str(caught.value)
    assert driver.memory.failures <= 4
    assert not driver.step.done


def test_a_model_that_is_mostly_weights_does_not_run_by_single_samples(monkeypatch):
    """What a sample takes is hidden behind gradients, so the first larger size that is tried may fail."""
    gradients = 890

    def peak(step, samples):
        # Gradients grow while what was kept shrinks: the peak is at one end or the other.
        step.memory.take(max(gradients + 1, 30 * samples), "step")

    monkeypatch.setattr(FakeStep, "_gradients", peak)
    monkeypatch.setattr(FakeStep, "resident", lambda step: {"weights": 0, "optimizer": 0, "gradients": gradients})
    driver = driver_on(1000)
    driver.run("train", BATCH)
    ((_, _, pieces),) = driver.step.done
    assert driver.memory.failures <= 4
    # 33 samples fit. By what one of them took it would be one.
    assert 256 / pieces > 8


def test_other_errors_pass_through_untouched():
    driver = driver_on(1000)
    error = ZeroDivisionError("the user's")
    driver.step.train = lambda *_: (_ for _ in ()).throw(error)
    with pytest.raises(ZeroDivisionError) as caught:
        driver.run("train", BATCH)
    assert caught.value is error
    assert not kinds(driver)


def test_a_batch_that_cannot_be_cut_says_so():
    driver = driver_on(100, slope=1)
    with pytest.raises((RecoveryFailedError, CannotFitError), match="first dimension"):
        driver.run("train", tuple(BATCH))


def test_compiled_steps_use_few_numbers_of_pieces():
    driver = driver_on(90, slope=1, equal_pieces=True)
    driver.run("train", BATCH)
    pieces = driver.step.done[0][2]
    assert pieces & (pieces - 1) == 0 or len(BATCH) % pieces == 0


@pytest.mark.parametrize("fixed", [0, 100, 500])
@pytest.mark.parametrize("budget", [700, 1500, 3000])
def test_a_budget_is_never_exceeded_not_even_by_a_probe(budget, fixed):
    driver = driver_on(100_000, fixed=fixed, slope=10, settings=Settings(budget=budget))
    for _ in range(4):
        driver.run("train", BATCH)
        driver.run("test", BATCH)
        driver.run("predict", BATCH)
    assert run_of(driver).peak <= budget
    assert driver.memory.failures == 0


def test_a_budget_too_small_is_refused_before_the_first_step():
    driver = driver_on(100_000, fixed=500, slope=10, settings=Settings(budget=400))
    with pytest.raises(CannotFitError, match="One sample at a time needs 510 B"):
        driver.run("train", BATCH)
    assert not driver.step.done


def test_a_budget_needs_a_device_that_can_be_measured():
    with pytest.raises(BackendError, match="cannot be kept"):
        driver_on(100, measurable=False, settings=Settings(budget=50))


def test_exact_only_refuses_to_cut_what_is_not_exact():
    driver = driver_on(100, inexact=("BatchNormalization (bn)",), settings=Settings(exact_only=True))
    with pytest.raises(CannotFitError, match="BatchNormalization"):
        driver.run("train", BATCH)
    assert not driver.step.done


def test_what_is_not_exact_is_said_once_and_kept_in_the_plan(caplog):
    driver = driver_on(100, inexact=("BatchNormalization (bn)",))
    for _ in range(3):
        driver.run("train", BATCH)
    assert sum("not exact" in record.message for record in caplog.records) == 1
    assert driver.plan.caveats == ("BatchNormalization (bn)",)


def test_data_is_looked_at_again_and_more_and_more_seldom():
    driver = driver_on(1000, slope=10, settings=Settings(micro_batch_size=16))
    asked = []
    driver.step.look = lambda data, pieces, again=False, room=None: asked.append((len(asked_at), again))
    asked_at = []
    for _ in range(130):
        asked_at.append(1)
        driver.run("train", list(range(64)))
    assert asked == [(1, False), *((2**power, True) for power in range(1, 8))]


def test_what_a_later_look_finds_counts():
    driver = driver_on(1000, slope=10, settings=Settings(micro_batch_size=16))
    driver.step.seen = [None, Exactness("not exact", ("halves differ",))]
    driver.run("train", list(range(64)))
    assert run_of(driver).exactness == Exactness()
    with pytest.warns(InexactWarning, match="halves differ"):
        driver.run("train", list(range(64)))
    assert run_of(driver).exactness == Exactness("not exact", ("halves differ",))
    driver = driver_on(1000, slope=10, settings=Settings(micro_batch_size=16, exact_only=True))
    driver.step.seen = [None, Exactness("not exact", ("halves differ",))]
    driver.run("train", list(range(64)))
    with pytest.raises(CannotFitError, match="halves differ"):
        driver.run("train", list(range(64)))


@pytest.mark.parametrize("phase", ["test", "predict"])
def test_predictions_are_looked_at_once_before_they_are_cut(phase):
    driver = driver_on(100, slope=10)
    driver.step.predicts = Exactness("not exact", ("they differ",))
    driver.run(phase, [0])
    with pytest.warns(InexactWarning, match="evaluating and predicting are not exact: they differ"):
        driver.run(phase, list(range(64)))
    driver.step.predicts = Exactness("not exact", ("they differ again",))
    driver.run(phase, list(range(64)))
    assert run_of(driver).exactness == Exactness()


def test_looking_at_predictions_may_fail():
    driver = driver_on(100, slope=10)
    driver.step.look_at_predictions = lambda data: 1 / 0
    driver.run("predict", list(range(64)))
    assert driver.step.done[0][:2] == ("predict", list(range(64)))


def test_one_line_for_each_event(caplog):
    driver = driver_on(100, slope=1)
    driver.run("train", BATCH)
    events = run_of(driver).events
    assert [record.message for record in caplog.records] == [event.message for event in events]
    assert {record.name for record in caplog.records} == {"oomproof"}
    assert "nothing lost" in events[0].message


def test_silent_is_silent(caplog):
    driver = driver_on(100, slope=1)
    driver.log.start(silent=True)
    driver.begin()
    driver.run("train", BATCH)
    assert not caplog.records
    assert run_of(driver).events


def test_phases_learn_by_themselves():
    driver = driver_on(100, slope=1)
    driver.run("train", BATCH)
    trained = driver.plan.micro_batch_size
    driver.step.slope = 0
    driver.run("test", BATCH)
    assert driver.step.done[-1][2] == 1
    assert driver.plan.micro_batch_size == trained


def test_a_given_size_is_kept_to():
    driver = driver_on(1000, slope=1, settings=Settings(micro_batch_size=50))
    for epoch in range(3):
        driver.begin_epoch(epoch)
        driver.run("train", BATCH)
    assert {pieces for *_, pieces in driver.step.done} == {6}


@pytest.mark.parametrize("late", [{0}, {1}, {3}, {1, 2}, {0, 5}])
def test_steps_that_fail_late_run_again_in_order(late):
    memory = FakeMemory(limit=12)
    step = FakeStep(memory, late=frozenset(late))
    driver = Driver(step, memory, Settings())
    batches = [[number] * 8 for number in range(4)]
    for batch in batches:
        driver.run("train", batch)
    driver.settle()
    assert [samples for _, samples, _ in step.done] == batches
    assert driver.log.steps["train"] == 4
    assert step.pending == []
    assert driver.record("fake", {}).ooms >= 1
    assert max(pieces for *_, pieces in step.done) > 1


def test_a_late_failure_that_is_not_about_memory_is_raised():
    memory = FakeMemory(limit=1000)
    step = FakeStep(memory, late=frozenset({0}))
    driver = Driver(step, memory, Settings())
    driver.run("train", [1] * 8)
    memory.shortage = lambda error: None
    with pytest.raises(FakeShortageError):
        driver.settle()
    assert step.done == []
    # Keras swallows errors while it reads logs: the missing batch is not passed over.
    with pytest.raises(FakeShortageError):
        driver.run("train", [2] * 8)
    assert step.done == []
    driver.log.start(silent=True)
    driver.begin()
    driver.run("train", [2] * 8)
