"""Real out-of-memory errors of the real framework, each scenario in a process of its own, under a limit that is real.

The scenarios are in shortages.py, and how memory is limited in oom_memory.py. What they must agree with is computed by
plain Keras, without a limit, in another process.
"""

from __future__ import annotations

import numpy as np
import oom_memory
import pytest
from here import BACKEND, at_length, only
from shortages import SCENARIOS, these

MIB = 2**20
STEPS, BATCH = 4, 128
MEASURED = BACKEND == "tensorflow"  # On a CPU the others do not know how much memory is left: pieces do not grow again.

pytestmark = pytest.mark.skipif(
    not oom_memory.is_possible(BACKEND), reason="a limit on the memory of a process takes Linux with glibc"
)


def assert_same_weights(found, expected, tolerance=2e-5):
    for a, b in zip(found["weights"], expected["weights"], strict=True):
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


TRAINED = {
    "first step": "reference",
    "ballast seen": "reference of 4 epochs",
    "ballast unseen": "reference of 4 epochs",
    "repeatedly": "reference of 4 epochs",
    "budget": "reference",
    "tight budget": "reference",
}


@pytest.mark.parametrize("name", these(*TRAINED))
def test_the_training_is_the_one_that_was_asked_for(answers, name):
    found, expected = answers(name), answers(TRAINED[name])
    assert_same_weights(found, expected)
    np.testing.assert_allclose(found["losses"], expected["losses"], rtol=1e-5)


@pytest.mark.parametrize("name", these(*TRAINED))
def test_every_sample_is_used_exactly_once_an_epoch_and_in_order(answers, name):
    found, expected = answers(name), answers(TRAINED[name])
    assert found["pulls"] == expected["pulls"]
    assert found["seen"] == expected["seen"] == [[1.0, 1.0]] * len(found["losses"])
    assert found["iterations"] == list(range(1, STEPS * len(found["losses"]) + 1))
    assert found["run"]["steps"]["train"] == len(found["iterations"])


@pytest.mark.parametrize("name", these("first step", "ballast unseen", "budget"))
def test_memory_in_use_returns_to_where_it_was(answers, name):
    """Apart from what the batches ahead in the queue hold, and ballast while it is there."""
    use = answers(name)["current"]
    if not MEASURED:
        # A whole process: programs are compiled meanwhile, and JAX frees what a step used a moment after its end.
        assert min(use[-STEPS:]) < max(use[:2]) + 8 * MIB
        return
    ballast = SCENARIOS[name][2].get("ballast", 0) * MIB
    assert max(use[-3:]) < max(use[:2]) + MIB
    assert max(use) < max(use[:2]) + ballast + 2 * MIB


def test_out_of_memory_on_the_first_step(answers):
    found = answers("first step")
    run, events = found["run"], found["run"]["events"]
    # A slow machine is also told how long the proof took.
    lines = [line for line in found["lines"] if "to prove" not in line]
    assert lines == [event["message"] for event in events]
    if MEASURED:
        # Depending on what the data's threads hold, a size that was tried to see what fits may fail, too; then the
        # first choice is careful and grows in the second epoch.
        ooms = [event for event in events if event["kind"] == "oom"]
        assert len(ooms) <= 2
        assert [event["kind"] for event in events if event not in ooms] in ([], ["grow"])
        (event,) = [event for event in ooms if event["before"] == BATCH]
        assert event["step"] == 0
        assert event["seconds"] >= 10
        assert max(event["after"] or 0 for event in events) >= 32
        assert run["peak"] <= 12 * MIB
    else:
        assert {event["kind"] for event in events} == {"oom"}
        assert events[0]["step"] == 0
        assert len(events) <= 3
        assert [event["after"] for event in events] == [BATCH // 2, BATCH // 4, BATCH // 8][: len(events)]


@at_length("tensorflow")
def test_memory_that_is_seen_to_be_scarce_costs_no_failure_where_it_can_be_seen(answers):
    events = answers("ballast seen")["run"]["events"]
    assert (events[0]["epoch"], events[0]["step"]) == (0, 2)
    # A look at what fits may fail, and then leaves sizes as they are; no step does.
    resized = [event for event in events if event["after"] is not None]
    assert resized[0]["kind"] == ("shrink" if MEASURED else "oom")
    if MEASURED:
        assert answers("ballast seen")["ooms"] <= 1
        assert "oom" not in {event["kind"] for event in resized}
        assert (events[-1]["kind"], events[-1]["after"]) == ("grow", BATCH)
        assert events[-1]["epoch"] >= 2


def test_memory_that_vanishes_in_the_middle_of_an_epoch(answers):
    events = answers("ballast unseen")["run"]["events"]
    assert (events[0]["kind"], events[0]["epoch"], events[0]["step"]) == ("oom", 0, 2)
    assert answers("ballast unseen")["ooms"] <= (2 if MEASURED else 4)
    if MEASURED:
        assert (events[-1]["kind"], events[-1]["after"]) == ("grow", BATCH)
        assert events[-1]["epoch"] >= 2


def test_out_of_memory_again_and_again(answers):
    found = answers("repeatedly")
    kinds = [event["kind"] for event in found["run"]["events"]]
    assert found["ooms"] >= 2  # After that sizes settle at what goes through in every epoch.
    assert kinds.count("grow") <= 3  # At most once an epoch.
    assert found["ooms"] <= 2 * 4


def test_out_of_memory_in_validation_only(answers):
    found, expected = answers("validation"), answers("reference validation")
    assert {(e["phase"], e["kind"]) for e in found["run"]["events"]} == {("test", "oom")}
    assert found["ooms"] <= (2 if MEASURED else 5)
    assert found["val_pulls"] == expected["val_pulls"]
    assert found["iterations"] == 32
    np.testing.assert_allclose(found["val_losses"], expected["val_losses"], rtol=1e-5)
    assert_same_weights(found, expected)


def test_out_of_memory_in_predict_only(answers):
    found, expected = answers("predict"), answers("reference predict")
    assert 1 <= len(found["lines"]) <= (2 if MEASURED else 5)
    assert all("predict batch 512 now runs as" in line for line in found["lines"])
    assert found["shape"] == [512, 512]
    assert_same_weights(found, expected, 1e-5)


@only("tensorflow", because="an update that is only possible in place, on a CPU")
def test_an_update_that_does_not_fit_is_applied_leanly(answers):
    found, expected = answers("commit"), answers("reference commit")
    assert found["kinds"] == [["commit-oom", 64, 64]]
    assert found["lean"]
    assert found["iterations"] == expected["iterations"] == 8
    assert found["pulls"] == expected["pulls"]
    np.testing.assert_allclose(found["losses"], expected["losses"], rtol=1e-5)
    # Adam moves every row by about its learning rate, 1e-3, whatever the size of the gradient.
    assert_same_weights(found, expected, 2e-5)


def test_an_update_that_hardly_fits_is_either_made_or_undone(answers):
    """Off TensorFlow the copy that an update in place needs lies in the same memory: it may be possible or not."""
    found, expected = answers("commit"), answers("reference commit")
    assert {kind for kind, _, _ in found["kinds"]} <= {"commit-oom", "oom"}
    if "error" in found:
        assert found["changed"] == []
        assert "optimizer's update does not fit" in found["error"]
    else:
        assert found["iterations"] == 8
        assert_same_weights(found, expected, 2e-5)


@pytest.mark.parametrize("name", these("commit fails", "commit fails with nothing free"))
def test_an_update_that_does_not_fit_at_all_is_undone_and_not_answered_with_smaller_pieces_alone(answers, name):
    found = answers(name)
    if BACKEND == "jax":
        # One program computes all of a step, and its error does not say which part ran out: pieces are tried first.
        assert found["kinds"][-2:] == [["commit-oom", 1, 1], ["oom", 1, None]]
    else:
        assert found["kinds"] == [["commit-oom", 64, 64], ["oom", 64, None]]
    assert found["changed"] == []
    assert found["iterations"] == 0
    assert "optimizer's update does not fit" in found["error"]


def test_not_even_one_sample_fits(answers):
    found = answers("hopeless")
    assert found["message"].startswith("A piece of 1 of 8 samples does not fit on CPU:0")
    assert "Resident: weights" in found["message"]
    # What was asked for, and not the first words of a long text.
    assert "alloc" in found["message"].split("The framework said: ")[1]
    errors = {"tensorflow": "ResourceExhaustedError", "jax": "JaxRuntimeError", "torch": "RuntimeError"}
    assert found["cause"] == errors[BACKEND]
    assert found["moved"] == []
    assert found["saved"]
    assert found["run_is_there"]
    assert found["epochs"] == [0]
    assert found["run_steps"]["train"] == found["iterations"] == 2
    assert found["kinds"][-1] == ["oom", 1, None]


def test_a_failed_step_has_changed_nothing_where_plain_keras_has(answers):
    found = answers("transactional")
    assert found["guarded"] == []
    assert "BatchNormalization" in found["error"]
    # What the same failure does without us: the reason why a step has two phases.
    if BACKEND == "jax":
        # The error is not even raised by the step. Weights were given away to the program that failed.
        assert any("kernel" in name for name in found["lost"])
        return
    assert found["plain_error"] == {"tensorflow": "ResourceExhaustedError", "torch": "RuntimeError"}[BACKEND]
    assert any("iteration" in name or "moving" in name for name in found["plain"])


# At 5 MB, of which batches in the queue hold one, the peaks of equal steps differ by more than is kept free
# (benchmarks/REPORT.md): it was exceeded by up to 13 %.
ALLOWED = {"budget": 1.0, "tight budget": 1.2}


@only("tensorflow", "jax", because="a budget on a CPU")
@pytest.mark.parametrize("name", these("budget", "tight budget"))
def test_no_step_goes_over_the_budget(answers, name):
    found = answers(name)
    budget = found["run"]["budget"] * ALLOWED[name]
    assert found["run"]["peak"] <= budget
    if MEASURED:
        assert max(found["peaks"]) <= budget
        # And it is used: much smaller pieces than needed would be slow.
        assert max(found["peaks"]) >= 0.6 * budget
    assert found["ooms"] == 0
    # What other threads hold varies a little: it may have to shrink once more, never to fail.
    kinds = [event["kind"] for event in found["run"]["events"]]
    assert kinds[0] == "plan"
    assert set(kinds) <= {"plan", "shrink"}


@pytest.mark.parametrize("name", these("whole steps", "split steps"))
def test_the_process_does_not_grow(answers, name):
    found = answers(name)
    assert found["steps"] == 2000
    assert found["slope"] < 1024  # Bytes a step; the allocator's own noise is a few hundred.
