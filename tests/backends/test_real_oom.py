"""Real out-of-memory errors on TensorFlow's real allocator, each scenario in a process of its own.

Every failed request waits ten seconds, idle, so all processes are started at once and run a few at a time. What they
must agree with is computed by plain Keras, without a limit, in another process.
"""

from __future__ import annotations

import concurrent.futures
import json
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest

CHILD = pathlib.Path(__file__).with_name("oom_child.py")
AT_ONCE = 5
MIB = 2**20
STEPS, BATCH = 4, 128

# name: (scenario, limit in MB, options). A whole batch of the test model needs 27 MiB.
SCENARIOS = {
    "reference": ("reference", 0, {"epochs": 2}),
    "reference of 4 epochs": ("reference", 0, {"epochs": 4}),
    "reference validation": ("validation", 0, {}),
    "reference predict": ("predict", 0, {}),
    "reference commit": ("commit", 0, {}),
    "first step": ("first_step", 12, {}),
    "ballast seen": ("ballast_seen", 40, {"ballast": 26}),
    "ballast unseen": ("ballast_unseen", 40, {"ballast": 26}),
    "repeatedly": ("repeatedly", 40, {"epochs": 4, "between": [20, 30]}),
    "validation": ("validation", 16, {}),
    "predict": ("predict", 14, {}),
    "commit": ("commit", 52, {}),
    "commit fails": ("commit", 40, {}),
    "commit fails with nothing free": ("commit", 30, {}),
    "hopeless": ("hopeless", 60, {}),
    "transactional": ("transactional", 12, {}),
    "budget": ("budget", 100, {"budget": "12MB"}),
    "tight budget": ("budget", 100, {"budget": "5MB"}),
    "whole steps": ("steps", 100, {"steps": 2000}),
    "split steps": ("steps", 0, {"steps": 2000, "guard": {"micro_batch_size": 8}}),
}
# The longest first, so that none of them runs alone at the end.
ORDER = sorted(SCENARIOS, key=lambda name: name not in ("repeatedly", "commit fails", "hopeless", "first step"))


def run_child(scenario, limit, options, path, timeout=240):
    command = [sys.executable, str(CHILD), scenario, str(limit), str(path), json.dumps(options)]
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(CHILD.parents[2] / "src"), os.environ.get("PYTHONPATH", "")]),
    }
    child = subprocess.run(command, env=env, capture_output=True, text=True, timeout=timeout)
    lines = child.stdout.strip().splitlines()
    if child.returncode or not lines:
        raise AssertionError(f"{scenario} under {limit} MB ended with {child.returncode}:\n{child.stderr[-4000:]}")
    answer = json.loads(lines[-1])
    answer["weights"] = list(np.load(path).values()) if path.exists() else []
    return answer


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    folder = tmp_path_factory.mktemp("oom")
    with concurrent.futures.ThreadPoolExecutor(AT_ONCE) as pool:
        running = {}
        for name in ORDER:
            scenario, limit, options = SCENARIOS[name]
            running[name] = pool.submit(run_child, scenario, limit, options, folder / f"{name.replace(' ', '_')}.npz")
        yield lambda name: running[name].result()
        for future in running.values():
            future.cancel()


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


@pytest.mark.parametrize(("name", "reference"), TRAINED.items())
def test_the_training_is_the_one_that_was_asked_for(answers, name, reference):
    found, expected = answers(name), answers(reference)
    assert_same_weights(found, expected)
    np.testing.assert_allclose(found["losses"], expected["losses"], rtol=1e-5)


@pytest.mark.parametrize(("name", "reference"), TRAINED.items())
def test_every_sample_is_used_exactly_once_an_epoch_and_in_order(answers, name, reference):
    found, expected = answers(name), answers(reference)
    assert found["pulls"] == expected["pulls"]
    assert found["seen"] == expected["seen"] == [[1.0, 1.0]] * len(found["losses"])
    assert found["iterations"] == list(range(1, STEPS * len(found["losses"]) + 1))
    assert found["run"]["steps"]["train"] == len(found["iterations"])


@pytest.mark.parametrize("name", ["first step", "ballast unseen", "budget"])
def test_memory_in_use_returns_to_where_it_was(answers, name):
    """Apart from what the batches ahead in the queue hold, and ballast while it is there."""
    found = answers(name)
    ballast = SCENARIOS[name][2].get("ballast", 0) * MIB
    before, after = found["current"][:2], found["current"][-3:]
    assert max(after) < max(before) + MIB
    assert max(found["current"]) < max(before) + ballast + 2 * MIB


def test_out_of_memory_on_the_first_step(answers):
    run = answers("first step")["run"]
    (event,) = run["events"]
    assert (event["kind"], event["step"], event["before"]) == ("oom", 0, BATCH)
    assert event["after"] >= 32
    assert event["seconds"] >= 10
    assert run["peak"] <= 12 * MIB
    assert answers("first step")["lines"] == [event["message"]]


def test_memory_that_is_seen_to_be_scarce_costs_no_failure(answers):
    events = answers("ballast seen")["run"]["events"]
    assert (events[0]["kind"], events[0]["epoch"], events[0]["step"]) == ("shrink", 0, 2)
    assert answers("ballast seen")["ooms"] <= 1
    assert (events[-1]["kind"], events[-1]["after"]) == ("grow", BATCH)
    assert events[-1]["epoch"] >= 2


def test_memory_that_vanishes_in_the_middle_of_an_epoch(answers):
    events = answers("ballast unseen")["run"]["events"]
    assert (events[0]["kind"], events[0]["epoch"], events[0]["step"]) == ("oom", 0, 2)
    assert answers("ballast unseen")["ooms"] <= 2
    assert (events[-1]["kind"], events[-1]["after"]) == ("grow", BATCH)
    assert events[-1]["epoch"] >= 2


def test_out_of_memory_again_and_again(answers):
    found = answers("repeatedly")
    kinds = [event["kind"] for event in found["run"]["events"]]
    assert found["ooms"] >= 3
    assert kinds.count("grow") <= 3  # At most once an epoch.
    assert found["ooms"] <= 2 * 4


def test_out_of_memory_in_validation_only(answers):
    found, expected = answers("validation"), answers("reference validation")
    assert {(e["phase"], e["kind"]) for e in found["run"]["events"]} == {("test", "oom")}
    assert found["ooms"] <= 2
    assert found["val_pulls"] == expected["val_pulls"]
    assert found["iterations"] == 32
    np.testing.assert_allclose(found["val_losses"], expected["val_losses"], rtol=1e-5)
    assert_same_weights(found, expected)


def test_out_of_memory_in_predict_only(answers):
    found, expected = answers("predict"), answers("reference predict")
    assert 1 <= len(found["lines"]) <= 2
    assert all("predict batch 512 now runs as" in line for line in found["lines"])
    assert found["shape"] == [512, 512]
    assert_same_weights(found, expected, 1e-5)


def test_an_update_that_does_not_fit_is_applied_leanly(answers):
    found, expected = answers("commit"), answers("reference commit")
    assert found["kinds"] == [["commit-oom", 64, 64]]
    assert found["lean"]
    assert found["iterations"] == expected["iterations"] == 8
    assert found["pulls"] == expected["pulls"]
    np.testing.assert_allclose(found["losses"], expected["losses"], rtol=1e-5)
    # Adam moves every row by about its learning rate, 1e-3, whatever the size of the gradient.
    assert_same_weights(found, expected, 2e-5)


@pytest.mark.parametrize("name", ["commit fails", "commit fails with nothing free"])
def test_an_update_that_does_not_fit_at_all_is_undone_and_never_answered_with_smaller_pieces(answers, name):
    found = answers(name)
    assert found["kinds"] == [["commit-oom", 64, 64], ["oom", 64, None]]
    assert found["changed"] == []
    assert found["iterations"] == 0
    assert "optimizer's update does not fit" in found["error"]


def test_not_even_one_sample_fits(answers):
    found = answers("hopeless")
    assert found["message"].startswith("A piece of 1 of 8 samples does not fit on CPU:0")
    assert "Resident: weights" in found["message"]
    assert found["cause"] == "ResourceExhaustedError"
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
    assert found["plain_error"] == "ResourceExhaustedError"
    assert any("iteration" in name or "moving" in name for name in found["plain"])


# At 5 MB, of which batches in the queue hold one, the peaks of equal steps differ by more than is kept free.
TOO_TIGHT = pytest.mark.xfail(reason="was exceeded by up to 13 %", strict=False)


@pytest.mark.parametrize("name", ["budget", pytest.param("tight budget", marks=TOO_TIGHT)])
def test_no_step_goes_over_the_budget(answers, name):
    found = answers(name)
    budget = found["run"]["budget"]
    assert max(found["peaks"]) <= budget
    assert found["run"]["peak"] <= budget
    # And it is used: much smaller pieces than needed would be slow.
    assert max(found["peaks"]) >= 0.6 * budget
    assert found["ooms"] == 0
    # What other threads hold varies a little: it may have to shrink once more, never to fail.
    kinds = [event["kind"] for event in found["run"]["events"]]
    assert kinds[0] == "plan"
    assert set(kinds) <= {"plan", "shrink"}


@pytest.mark.parametrize("name", ["whole steps", "split steps"])
def test_the_process_does_not_grow(answers, name):
    found = answers(name)
    assert found["steps"] == 2000
    assert found["slope"] < 1024  # Bytes a step; the allocator's own noise is a few hundred.
