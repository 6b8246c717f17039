"""The driver with plans, on a fake device: when one is asked for, what is done with it, and what if it is not kept."""

from __future__ import annotations

import dataclasses

import pytest

from oomproof._backends.fake import FakeMemory, FakeStep
from oomproof._records.exactness import Exactness
from oomproof._records.plan import Plan
from oomproof._training.driver import Driver
from oomproof._training.settings import Settings
from oomproof.errors import InexactWarning

BATCH = list(range(256))
INEXACT = ("BatchNormalization (bn) normalises with the statistics of each piece",)


@dataclasses.dataclass
class RecomputingStep(FakeStep):
    """Each segment that is recomputed takes a quarter off what a sample needs."""

    recompute: tuple[str, ...] = ()

    def _gradients(self, samples):
        slope = self.slope * (1 - 0.25 * len(self.recompute))
        self.memory.take(self.fixed + slope * samples, "step")


class Proposals:
    """Hands out plans in turn, and remembers what it was asked."""

    def __init__(self, *plans):
        self.plans, self.asked = list(plans), []

    def __call__(self, data, device, limit, caution):
        self.asked.append((len(data), device.name, limit, round(caution, 3)))
        return self.plans.pop(0) if self.plans else None


def driver_with(proposals, limit, *, resident=0, settings=None, **step):
    memory = FakeMemory(limit, resident)
    settings = dataclasses.replace(settings or Settings(), propose=proposals)
    driver = Driver(RecomputingStep(memory, **step), memory, settings)
    driver.begin()
    driver.begin_epoch(0)
    return driver


def events(driver):
    return [(event.kind, event.before, event.after) for event in driver.record("fake", {}).events]


def planned(**changes):
    return Plan(batch_size=256, predicted=900, limit=1000, relative_time=1.2, segments=3, **changes)


def test_a_plan_is_made_before_the_first_step_and_nothing_fails():
    proposals = Proposals(planned(micro_batch_size=64, recompute=("a..b",)))
    driver = driver_with(proposals, 1000, slope=19)
    for _ in range(3):
        driver.run("train", BATCH)
    assert driver.memory.failures == 0
    assert [pieces for _, _, pieces in driver.step.done] == [4, 4, 4]
    assert driver.step.recompute == ("a..b",)
    assert events(driver) == [("plan", 256, 64)]
    assert len(proposals.asked) == 1
    plan = driver.plan
    assert (plan.micro_batch_size, plan.recompute, plan.predicted, plan.segments) == (64, ("a..b",), 900, 3)


def test_its_pieces_stay_as_they_are_in_the_epoch_it_was_made_in():
    # There is room for four times as many samples.
    driver = driver_with(Proposals(planned(micro_batch_size=64)), 1000, slope=2)
    for _ in range(3):
        driver.run("train", BATCH)
    assert [pieces for _, _, pieces in driver.step.done] == [4, 4, 4]
    driver.begin_epoch(1)
    driver.run("train", BATCH)
    assert driver.step.done[-1][2] == 1


def test_it_is_told_what_there_is_for_the_model_and_the_step():
    proposals = Proposals(None)
    driver_with(proposals, 1000, resident=200, slope=1).run("train", BATCH)
    # 800 are free, and the 200 in use are the model's own.
    assert proposals.asked == [(256, "FAKE:0", 1000, 1.0)]


def test_batches_that_are_on_the_device_already_are_not_counted_twice():
    proposals = Proposals(None)
    driver = driver_with(proposals, 10_000, slope=1)
    driver.step.batches_on_device = 2
    driver.run("train", BATCH)
    # What is in use counts two batches of 256 samples of a byte each, which the plan counts, too.
    assert proposals.asked[0][2] == 10_000 + 2 * 256


def test_where_no_plan_is_needed_the_batch_runs_as_it_is():
    driver = driver_with(Proposals(None), 10_000, slope=10)
    driver.run("train", BATCH)
    assert driver.step.done == [("train", BATCH, 1)]
    assert events(driver) == []


def test_only_training_is_planned():
    proposals = Proposals()
    driver = driver_with(proposals, 10_000, slope=10)
    driver.run("test", BATCH)
    driver.run("predict", BATCH)
    assert proposals.asked == []


def test_a_plan_that_is_not_kept_is_answered_with_more_recomputation_where_cutting_is_not_exact():
    proposals = Proposals(planned(recompute=("a",)), planned(recompute=("a", "b")))
    driver = driver_with(proposals, 1500, slope=10, inexact=INEXACT)
    driver.run("train", BATCH)
    assert driver.step.done == [("train", BATCH, 1)]
    assert driver.step.recompute == ("a", "b")
    assert events(driver) == [("plan", 256, 256), ("oom", 256, 256)]
    assert [caution for *_, caution in proposals.asked] == [1.0, 1.2]
    assert driver.plan.caveats == ()


def test_and_with_measured_pieces_where_cutting_is_exact():
    proposals = Proposals(planned(recompute=("a",)))
    driver = driver_with(proposals, 1500, slope=10)
    driver.run("train", BATCH)
    assert len(proposals.asked) == 1
    assert driver.step.recompute == ("a",)
    assert driver.step.done[0][2] > 1
    assert driver.memory.failures == 1


def test_when_recomputation_has_no_more_to_give_the_batch_is_cut_and_it_is_said():
    driver = driver_with(Proposals(planned(recompute=("a",)), None), 1000, slope=10, inexact=INEXACT)
    driver.run("train", BATCH)
    assert driver.step.done[0][2] > 1
    assert driver.plan.caveats == INEXACT


def test_a_plan_that_nobody_thought_necessary_is_made_after_a_failure():
    proposals = Proposals(None, planned(recompute=("a", "b", "c")))
    driver = driver_with(proposals, 1000, slope=10)
    driver.run("train", BATCH)
    assert [caution for *_, caution in proposals.asked] == [1.0, 1.2]
    assert events(driver) == [("oom", 256, 256)]
    assert driver.step.done == [("train", BATCH, 1)]


def test_it_is_not_asked_for_plans_for_ever():
    proposals = Proposals(*(planned(recompute=(name,)) for name in "abcdefgh"))  # None of them is enough.
    driver = driver_with(proposals, 1000, slope=10, inexact=INEXACT)
    driver.run("train", BATCH)
    assert len(proposals.asked) == 4
    assert driver.step.done[0][2] > 1


def test_what_was_measured_without_a_plan_does_not_count_with_it():
    proposals = Proposals(None, planned(micro_batch_size=64, recompute=("a", "b")))
    driver = driver_with(proposals, 3000, slope=10, inexact=INEXACT)
    driver.run("train", BATCH)
    driver.memory.resident = 1200
    driver.run("train", BATCH)
    driver.begin_epoch(1)
    driver.run("train", BATCH)
    # Half of 2560 bytes fits into 1800.
    assert [pieces for _, _, pieces in driver.step.done] == [1, 4, 1]


def test_after_a_failure_nothing_larger_is_tried_before_the_next_epoch():
    proposals = Proposals(planned(micro_batch_size=128), planned(micro_batch_size=32, recompute=("a..b",)))
    driver = driver_with(proposals, 1000, slope=10, inexact=INEXACT)
    for _ in range(3):
        driver.run("train", BATCH)
    assert [pieces for _, _, pieces in driver.step.done] == [8, 8, 8]
    assert driver.memory.failures == 1
    driver.begin_epoch(1)
    driver.run("train", BATCH)
    assert driver.step.done[-1][-1] < 8


def test_a_given_plan_is_followed_and_no_other_made():
    proposals = Proposals()
    settings = Settings(start=planned(micro_batch_size=32, recompute=("a",)))
    driver = driver_with(proposals, 1000, settings=settings, slope=10)
    driver.run("train", BATCH)
    assert proposals.asked == []
    assert driver.step.recompute == ("a",)
    assert driver.step.done[0][2] == 8
    assert events(driver) == []


def test_what_there_is_no_memory_to_prove_is_not_called_exact():
    driver = driver_with(Proposals(), 10_000, settings=Settings(start=planned(recompute=("a",))), slope=10)
    driver.step.prove = lambda *_, **__: driver.memory.take(10**6, "step")
    with pytest.warns(InexactWarning, match="too little memory to prove"):
        driver.run("train", BATCH)
    assert driver.step.done == [("train", BATCH, 1)]
    assert not driver.plan.exactness.holds


@pytest.mark.parametrize("exact_only", [False, True])
def test_recomputation_that_nobody_asked_for_and_that_is_not_proven_is_left_out(exact_only, recwarn):
    proposals = Proposals(planned(recompute=("a",)), planned(recompute=("a", "b")))
    driver = driver_with(proposals, 1000, slope=10, settings=Settings(exact_only=exact_only))
    driver.step.prove = lambda data, samples, cut: proof_of(driver.step)
    driver.run("train", BATCH)
    assert driver.step.recompute == ()
    assert driver.step.done[0][2] > 1
    assert driver.record("fake", {}).exactness.word == "exact"
    assert len(proposals.asked) == 1
    assert not [warning for warning in recwarn if warning.category is InexactWarning]


def proof_of(step):
    if step.recompute:
        raise RuntimeError("no such kernel")
    return Exactness()


def test_where_it_is_cutting_that_is_not_exact_it_stays():
    driver = driver_with(Proposals(planned(micro_batch_size=64, recompute=("a",))), 10_000, slope=10)
    driver.step.prove = lambda data, samples, cut: Exactness("not exact", ("a layer mixes samples",))
    with pytest.warns(InexactWarning, match="mixes samples"):
        driver.run("train", BATCH)
    assert driver.step.recompute == ("a",)
    assert driver.step.done == [("train", BATCH, 4)]


def test_where_pieces_would_not_be_exact_either_it_stays():
    driver = driver_with(Proposals(planned(recompute=("a",))), 10_000, slope=10, inexact=INEXACT)
    driver.step.prove = lambda data, samples, cut: proof_of(driver.step)
    with pytest.warns(InexactWarning, match="no such kernel"):
        driver.run("train", BATCH)
    assert driver.step.recompute == ("a",)
    assert driver.step.done[0][2] == 1


def test_a_batch_that_goes_on_without_a_plan_that_was_to_blame_is_proven_as_it_runs():
    driver = driver_with(Proposals(planned(micro_batch_size=64, recompute=("a",))), 10_000, slope=10)
    gradients, ways = driver.step._gradients, []

    def broken(samples):
        if driver.step.recompute:
            raise TypeError("cannot be recomputed")
        gradients(samples)

    driver.step._gradients = broken
    driver.step.prove = lambda data, samples, cut: ways.append((cut, driver.step.recompute)) or Exactness()
    driver.run("train", BATCH)
    assert ways == [(True, ("a",)), (True, ())]
    assert driver.step.done == [("train", BATCH, 4)]


def test_a_smaller_last_batch_is_no_reason_to_plan_a_training_that_goes_well():
    proposals = Proposals(planned(micro_batch_size=2, recompute=("a",)))
    driver = driver_with(proposals, 1000, slope=10, settings=Settings(micro_batch_size=64))
    for batch in (BATCH, BATCH, BATCH[:20], BATCH):
        driver.run("train", batch)
    assert proposals.asked == []
    assert [pieces for _, _, pieces in driver.step.done] == [4, 4, 1, 4]


def test_a_plan_may_be_to_apply_updates_in_place():
    driver = driver_with(Proposals(planned(micro_batch_size=64, lean_commit=True)), 1000, slope=10, update=2400)
    driver.run("train", BATCH)
    assert driver.memory.failures == 0
    assert driver.plan.lean_commit


def test_within_a_budget_the_plan_says_what_to_recompute_and_measuring_how_much_at_a_time():
    proposals = Proposals(planned(micro_batch_size=128, recompute=("a", "b")))
    driver = driver_with(proposals, 10_000, settings=Settings(budget=600), slope=10, fixed=20)
    driver.run("train", BATCH)
    assert driver.step.recompute == ("a", "b")
    assert driver.memory.peak <= 600
    assert driver.memory.failures == 0


def test_a_plan_that_leaves_little_room_is_tried_on_small_pieces_and_corrected_once():
    # Said to take 900 of 1000; what the kernels take to work in makes it 1600.
    first = planned(micro_batch_size=128, recompute=("a..b",))
    second = dataclasses.replace(first, micro_batch_size=64)
    proposals = Proposals(first, second)
    driver = driver_with(proposals, 1000, slope=16, tries_are_cheap=True, inexact=INEXACT)
    driver.run("train", BATCH)
    assert driver.memory.failures == 0
    assert max(driver.step.probes) <= 64
    assert events(driver)[:2] == [("plan", 256, 128), ("plan", 128, 64)]
    # By how much more was measured: 128 samples × 12 bytes, where 900 were said.
    assert [round(caution, 2) for *_, caution in proposals.asked] == [1.0, round(128 * 12 / 900, 2)]
    driver.run("train", BATCH)
    assert len(proposals.asked) == 2


def test_a_plan_that_is_kept_by_small_pieces_stays():
    driver = driver_with(Proposals(planned(micro_batch_size=64)), 1000, slope=14, tries_are_cheap=True)
    driver.run("train", BATCH)
    assert driver.step.probes
    assert events(driver) == [("plan", 256, 64)]


def test_nothing_is_tried_where_a_size_has_to_be_compiled_or_where_there_is_room():
    for step, plan in (({}, planned(micro_batch_size=64)), ({"tries_are_cheap": True}, None)):
        roomy = dataclasses.replace(planned(micro_batch_size=64), predicted=500)
        driver = driver_with(Proposals(plan or roomy), 1000, slope=7, **step)
        driver.run("train", BATCH)
        assert not driver.step.probes


def test_what_a_given_plan_changes_about_the_model_is_in_the_plan_of_the_run():
    given = planned(precision="mixed_bfloat16", caveats=("computed in mixed_bfloat16, not in float32",))
    driver = driver_with(Proposals(), 10_000, settings=Settings(start=given), slope=10)
    driver.run("train", BATCH)
    assert driver.plan.precision == "mixed_bfloat16"
    assert driver.plan.caveats == given.caveats
    assert driver.plan.predicted is None


@pytest.mark.parametrize("recompute", [(), ("a", "b")])
def test_a_plan_within_a_budget_is_followed_as_it_is(recompute):
    """Most of what a sample takes is fixed: by one sample alone, nothing larger would be tried."""
    slope = 4 if not recompute else 8
    plan = dataclasses.replace(planned(micro_batch_size=128, recompute=recompute), predicted=300 + 128 * 4)
    driver = driver_with(Proposals(plan), 10_000, settings=Settings(budget=900), slope=slope, fixed=300)
    driver.run("train", BATCH)
    assert [pieces for *_, pieces in driver.step.done] == [2]
    assert driver.step.recompute == recompute
    assert 0.85 * 900 < driver.memory.peak <= 900


def test_a_plan_that_a_budget_does_not_hold_is_made_again_before_it_runs():
    first = dataclasses.replace(planned(micro_batch_size=128), predicted=700)
    second = dataclasses.replace(planned(micro_batch_size=128, recompute=("a", "b")), predicted=700)
    proposals = Proposals(first, second)
    driver = driver_with(proposals, 10_000, settings=Settings(budget=900), slope=12)
    driver.run("train", BATCH)
    assert driver.step.recompute == ("a", "b")
    assert [pieces for *_, pieces in driver.step.done] == [2]
    assert driver.memory.peak <= 900


class TellingMemory(FakeMemory):
    """Says what a step needed, as XLA does."""

    def take(self, size, where):
        self.asked = int(size)
        super().take(size, where)

    def shortage(self, error):
        found = super().shortage(error)
        return found and dataclasses.replace(found, needed=self.asked)


def test_what_a_refused_program_needed_corrects_the_next_plan():
    first = dataclasses.replace(planned(micro_batch_size=128), predicted=640)
    proposals, memory = Proposals(first, planned(micro_batch_size=32)), TellingMemory(700)
    driver = Driver(RecomputingStep(memory, slope=7), memory, Settings(propose=proposals))
    driver.begin()
    driver.run("train", BATCH)
    assert [asked[3] for asked in proposals.asked] == [1.0, round(1.02 * 7 * 128 / 640, 3)]
    assert driver.plan.micro_batch_size == 32
    assert [kind for kind, _, _ in events(driver)] == ["plan", "oom"]
