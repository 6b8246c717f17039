"""Hundreds of real out-of-memory errors, and training that does not notice. About 10 minutes on each backend."""

from __future__ import annotations

import concurrent.futures
import pathlib
import sys

import numpy as np
import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "backends"))
from here import BACKEND
from test_real_oom import assert_same_weights, run_child

PROCESSES, EPOCHS = 6, 40
MIB = 2**20


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.skipif(BACKEND == "tensorflow", reason="each failure waits ten seconds: the test below runs them at once")
def test_a_hundred_runs_out_of_memory_in_one_process(tmp_path):
    limit, epochs = {"jax": 20, "torch": 12}[BACKEND], 100
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        arguments = ((bytes_, {"epochs": epochs}, tmp_path / f"{bytes_}.npz", 3600) for bytes_ in (0, limit))
        expected, found = pool.map(lambda given: run_child("anew", *given), arguments)
    assert min(found["ooms"]) >= 1
    assert_same_weights(found, expected, 1e-3)
    np.testing.assert_allclose(found["losses"], expected["losses"], rtol=1e-4)
    assert found["pulls"] == expected["pulls"]
    assert found["seen"] == [[1.0, 1.0]] * epochs
    assert found["iterations"] == list(range(1, 4 * epochs + 1))
    # Every run compiles its programs anew on JAX; what a failed step held would be megabytes each time.
    use = found["current"]
    assert min(use[-40:]) - min(use[40:80]) < 0.5 * MIB * epochs


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.skipif(BACKEND != "tensorflow", reason="where memory cannot be measured pieces never grow again")
def test_two_hundred_times_out_of_memory(tmp_path):
    with concurrent.futures.ThreadPoolExecutor(PROCESSES + 1) as pool:
        reference = pool.submit(run_child, "reference", 0, {"epochs": EPOCHS}, tmp_path / "reference.npz", 3600)
        runs = [
            pool.submit(
                run_child, "repeatedly", 40, {"epochs": EPOCHS, "between": [18, 32], "seed": seed},
                tmp_path / f"{seed}.npz", 3600,
            )
            for seed in range(PROCESSES)
        ]  # fmt: skip
        expected, found = reference.result(), [run.result() for run in runs]
    assert sum(run["ooms"] for run in found) >= 200
    for run in found:
        # Rounding adds up over 160 steps, all of them cut differently.
        assert_same_weights(run, expected, 1e-3)
        np.testing.assert_allclose(run["losses"], expected["losses"], rtol=1e-4)
        assert run["pulls"] == expected["pulls"]
        assert run["seen"] == [[1.0, 1.0]] * EPOCHS
        assert run["iterations"] == list(range(1, 4 * EPOCHS + 1))


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("guarded", [{}, {"micro_batch_size": 8}], ids=["whole", "split"])
def test_many_steps_do_not_grow_the_process(tmp_path, guarded):
    answer = run_child(
        "steps",
        100 if BACKEND == "tensorflow" else 0,
        {"steps": 20_000, "guard": guarded},
        tmp_path / "steps.npz",
        1800,
    )
    assert answer["slope"] < 100
