"""At least two hundred real out-of-memory errors, and training that does not notice. About 10 minutes."""

from __future__ import annotations

import concurrent.futures
import pathlib
import sys

import numpy as np
import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "backends"))
from test_real_oom import assert_same_weights, run_child

PROCESSES, EPOCHS = 6, 40


@pytest.mark.soak
@pytest.mark.timeout(3600)
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
    answer = run_child("steps", 100, {"steps": 20_000, "guard": guarded}, tmp_path / "steps.npz", 1800)
    assert answer["slope"] < 100
