"""What helps a training may fail: that is told once, with its type and text, and the training runs as it would have."""

from __future__ import annotations

import json
import threading

import pytest

from oomproof._backends.fake import FakeMemory, FakeShortageError, FakeStep
from oomproof._machine import host
from oomproof._planning import plan_cache
from oomproof._records.exactness import Exactness
from oomproof._records.plan import Plan
from oomproof._training.driver import Driver
from oomproof._training.helpers import in_a_line, optional
from oomproof._training.settings import Settings
from oomproof.errors import CannotFitError, InexactWarning, RecoveryFailedError

BATCH = list(range(256))


def driver_on(limit, settings=None, step=FakeStep, **options):
    memory = FakeMemory(limit)
    driver = Driver(step(memory, **options), memory, settings or Settings())
    driver.begin()
    driver.begin_epoch(0)
    return driver


def warned(caplog):
    return [record.message for record in caplog.records if "failed" in record.message]


def test_a_planner_that_fails_is_told_once_and_not_asked_again(caplog):
    asked = []

    def propose(*given):
        asked.append(given)
        raise KeyError("no such layer")

    driver = driver_on(1000, Settings(propose=propose), slope=10)
    for _ in range(3):
        driver.run("train", BATCH)
    assert [samples for _, samples, _ in driver.step.done] == [BATCH] * 3
    assert len(asked) == 1
    (line,) = warned(caplog)
    assert line == "oomproof: Planning failed; training goes on without it (KeyError: 'no such layer')."
    assert caplog.records[0].levelname == "WARNING"


class Rigid(FakeStep):
    """A step that does not have the segments of the plan."""

    @property
    def recompute(self):
        return ()

    @recompute.setter
    def recompute(self, segments):
        if segments:
            raise ValueError("no segment of that name")


def test_a_plan_that_cannot_be_followed_is_not(caplog):
    driver = driver_on(10_000, Settings(propose=lambda *_: Plan(recompute=("gone",))), step=Rigid, slope=10)
    driver.run("train", BATCH)
    assert driver.plan.recompute == ()
    assert driver.step.done == [("train", BATCH, 1)]
    assert len(warned(caplog)) == 1


def test_a_plan_that_the_user_gave_and_that_cannot_be_followed_is_an_error():
    driver = driver_on(10_000, Settings(start=Plan(recompute=("gone",))), step=Rigid, slope=10)
    with pytest.raises(ValueError, match="no segment of that name"):
        driver.run("train", BATCH)


class Proofs:
    """What was proven before, out of order in one of its parts."""

    def __init__(self, broken):
        self.broken = broken

    def _part(self, name, answer):
        if name == self.broken:
            raise RuntimeError(f"{name} is broken")
        return answer

    def key(self, data, cut, recompute, head):
        return self._part("key", "some name")

    def recall(self, key):
        return self._part("recall", None)

    def remember(self, key, facts):
        return self._part("remember", None)


@pytest.mark.parametrize("part", ["key", "recall", "remember"])
def test_what_was_proven_before_may_be_out_of_order(part, caplog):
    driver = driver_on(1000, Settings(micro_batch_size=64, proofs=Proofs(part)), slope=10)
    for _ in range(2):
        driver.run("train", BATCH)
    assert [pieces for *_, pieces in driver.step.done] == [4, 4]
    assert driver.step.proofs == [5]
    assert driver.plan.exactness.holds
    (line,) = warned(caplog)
    assert f"RuntimeError: {part} is broken" in line


def test_a_monitor_that_fails_is_told_once_and_left_alone(monkeypatch, caplog):
    looks = []

    def resident():
        looks.append(1)
        raise OSError("no /proc here")

    monkeypatch.setattr(host, "resident", resident)
    monkeypatch.setattr("oomproof._training.run_log._SECONDS_BETWEEN_LOOKS", 0.0)
    driver = driver_on(10_000, slope=10)
    for _ in range(3):
        driver.run("train", BATCH)
    assert len(driver.step.done) == 3
    assert len(looks) == 1
    assert warned(caplog) == [
        "oomproof: Watching the host's memory failed; training goes on without it (OSError: no /proc here)."
    ]


def unprobed(*_):
    raise TypeError("batches of one sample are too small")


def test_measuring_small_batches_may_fail(caplog):
    driver = driver_on(1000, slope=10)
    driver.step.probe = unprobed
    driver.run("train", BATCH)
    assert driver.step.done[0][1] == BATCH
    assert "TypeError: batches of one sample are too small" in warned(caplog)[0]


def test_but_not_where_a_budget_is_to_be_kept():
    driver = driver_on(10_000, Settings(budget=1000), slope=10)
    driver.step.probe = unprobed
    with pytest.raises(TypeError, match="too small"):
        driver.run("train", BATCH)


def test_only_errors_are_swallowed(caplog):
    with pytest.raises(KeyboardInterrupt), optional("Waiting"):
        raise KeyboardInterrupt
    assert not caplog.records


def test_an_error_in_a_line():
    assert in_a_line(ValueError("one\ntwo")) == "ValueError: one"
    assert in_a_line(ValueError()) == "ValueError"


def test_files_are_read_whole_while_threads_write_them(tmp_path):
    path = tmp_path / "plans" / "one.json"
    texts = [{"number": number, "filler": "x" * 200_000} for number in range(4)]
    plan_cache.write(path, texts[0])
    done = threading.Event()
    writers = [
        threading.Thread(target=lambda text=text: [plan_cache.write(path, text) for _ in range(25)]) for text in texts
    ]
    torn = []

    def read():
        while not done.is_set():
            try:
                torn.extend([] if json.loads(path.read_text()) in texts else ["mixed"])
            except ValueError:
                torn.append("half")

    reader = threading.Thread(target=read)
    for thread in (reader, *writers):
        thread.start()
    for thread in writers:
        thread.join()
    done.set()
    reader.join()
    assert torn == []
    assert list(path.parent.iterdir()) == [path]


def test_a_disk_that_is_full_leaves_nothing_behind(tmp_path, monkeypatch):
    monkeypatch.setattr("pathlib.Path.replace", lambda *_: (_ for _ in ()).throw(OSError("no space left")))
    plan_cache.write(tmp_path / "one.json", {"a": 1})
    assert list(tmp_path.iterdir()) == []


class Lazy(FakeStep):
    """A step whose segments turn out to be beyond the framework when they are first run."""

    def _gradients(self, samples):
        if self.recompute:
            raise NotImplementedError("no gradient for this segment")
        super()._gradients(samples)


@pytest.mark.parametrize("proven", [True, False])
def test_a_plan_that_fails_when_it_is_first_run_is_dropped(proven, caplog, recwarn):
    plan = Plan(recompute=("a",), micro_batch_size=64)
    driver = driver_on(10_000, Settings(propose=lambda *_: plan), step=Lazy, slope=10)
    if proven:
        driver.step.prove = lambda *_: Exactness()
    driver.run("train", BATCH)
    assert [samples for _, samples, _ in driver.step.done] == [BATCH]
    assert driver.plan.recompute == ()
    (line,) = (r.message for r in caplog.records if "no gradient for this segment" in r.message)
    assert ("Recomputing parts of the model failed" if proven else "the plan's recomputation is left out") in line
    assert not [warning for warning in recwarn if warning.category is InexactWarning]


def test_and_an_error_of_the_user_still_is_one(caplog):
    driver = driver_on(10_000, Settings(propose=lambda *_: Plan(recompute=("a",))), slope=10)
    error = ZeroDivisionError("the user's")
    driver.step.train = lambda *_: (_ for _ in ()).throw(error)
    with pytest.raises(ZeroDivisionError) as caught:
        driver.run("train", BATCH)
    assert caught.value is error


def test_measuring_that_fails_is_told_once(caplog):
    driver = driver_on(1000, slope=10)
    driver.step.probe = unprobed
    for _ in range(3):
        driver.run("train", BATCH)
    assert sum("Measuring small batches failed" in line for line in warned(caplog)) == 1


def test_an_error_is_raised_though_it_cannot_be_explained(monkeypatch, caplog):
    monkeypatch.setattr("oomproof._training.messages.explain", lambda *_: {}["no such pattern"])
    driver = driver_on(100, fixed=150)
    with pytest.raises(RecoveryFailedError, match="does not fit") as caught:
        driver.run("train", BATCH)
    assert caught.value.diagnosis is None
    assert len(warned(caplog)) == 1


def test_a_shortage_behind_an_error_of_keras_is_told_with_numbers():
    driver = driver_on(100)

    def unbuilt(*_):
        try:
            driver.memory.take(200, "step")
        except FakeShortageError:
            raise RuntimeError("Unable to automatically build the model.")  # noqa: B904 (as Keras does)

    driver.step.prepare = unbuilt
    with pytest.raises(CannotFitError, match="Resident so far: weights") as caught:
        driver.run("train", BATCH)
    assert isinstance(caught.value.__cause__, FakeShortageError)
