"""What helps a training looks at the clock, and gives up where it takes too long."""

import threading

import pytest

from oomproof._backends.fake import FakeMemory, FakeShortageError, FakeStep
from oomproof._records import patience as patience_module
from oomproof._records.patience import TookTooLongError, look_at_the_clock, patience
from oomproof._simulators import one_at_a_time
from oomproof._training.proving import Proving
from oomproof._training.settings import Settings


@pytest.fixture
def clock(monkeypatch):
    class Clock:
        now = 0.0

        def monotonic(self):
            return self.now

    clock = Clock()
    monkeypatch.setattr(patience_module, "time", clock)
    return clock


def test_it_is_late_after_half_a_minute_and_before_what_cannot_be_done_by_then(clock):
    look_at_the_clock()
    with patience():
        clock.now = 20
        look_at_the_clock(ahead=5)
        with pytest.raises(TookTooLongError, match="longer than 30 s"):
            look_at_the_clock(ahead=15)
        clock.now = 31
        with pytest.raises(TookTooLongError):
            look_at_the_clock()
    look_at_the_clock(ahead=1000)


def test_what_is_inside_has_no_more_patience_than_the_whole(clock):
    with patience(10):
        clock.now = 9
        with patience(10):
            clock.now = 11
            with pytest.raises(TookTooLongError, match="10 s"):
                look_at_the_clock()
        with pytest.raises(TookTooLongError):
            look_at_the_clock()


def test_other_threads_have_their_own(clock):
    with patience():
        clock.now = 100
        thread = threading.Thread(target=look_at_the_clock)
        thread.start()
        thread.join()


def test_a_proof_that_takes_too_long_is_no_proof_and_stops_nobody(clock):
    class SlowStep(FakeStep):
        def prove(self, data, samples, cut):
            clock.now += 40
            look_at_the_clock()

    memory = FakeMemory(1000)
    found = Proving(SlowStep(memory), memory, Settings())(list(range(8)), 2)
    assert found.word == "not exact"
    assert "that was not proven, since it takes longer than 30 s" in str(found)


def test_tries_with_fewer_samples_share_one_patience(clock):
    tried = []

    class ShortStep(FakeStep):
        def prove(self, data, samples, cut):
            tried.append(samples)
            clock.now += 20
            look_at_the_clock()
            raise FakeShortageError("step")

    memory = FakeMemory(1000)
    found = Proving(ShortStep(memory), memory, Settings())(list(range(64)), 2)
    assert len(tried) == 2
    assert "longer than 30 s" in str(found)


def test_who_estimates_in_another_thread_is_not_waited_for_beyond_that():
    held, done = threading.Event(), threading.Event()

    def estimate():
        with one_at_a_time():
            held.set()
            done.wait(10)

    thread = threading.Thread(target=estimate)
    thread.start()
    held.wait(10)
    try:
        with patience(0.05), pytest.raises(TookTooLongError), one_at_a_time():
            pass
    finally:
        done.set()
        thread.join()
    with patience(10), one_at_a_time(), one_at_a_time():
        pass
