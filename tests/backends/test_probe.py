"""Estimates by real steps on the device at hand."""

import json
import os
import pathlib
import subprocess
import sys

import keras
import oom_memory
import pytest
from here import BACKEND, only

import oomproof

HERE = pathlib.Path(__file__).parent


def asked(megabytes):
    env = {**os.environ, **oom_memory.environment(BACKEND, megabytes), "KERAS_BACKEND": BACKEND}
    env["PYTHONPATH"] = str(HERE.parents[1] / "src")
    child = subprocess.run([sys.executable, str(HERE / "probe_child.py")], env=env, capture_output=True, text=True)
    assert child.returncode == 0, child.stderr[-2000:]
    return json.loads(child.stdout.strip().splitlines()[-1])


@pytest.fixture(scope="module")
def answer():
    # Little more than the step itself takes, so that it is not run to see.
    return asked(88)


@only("tensorflow", because="peaks of a real allocator on a CPU")
def test_a_line_through_small_steps_says_what_a_large_one_takes(answer):
    estimate, peak = answer["estimate"], answer["peak"]
    assert estimate["engine"] == "probe"
    assert estimate["low"] <= peak <= estimate["high"]
    assert abs(estimate["expected"] / peak - 1) < 0.15
    assert "batches of 32, 64, 128 on" in estimate["notes"][-1]


@only("tensorflow", because="peaks of a real allocator on a CPU")
def test_what_surely_fits_is_run_as_it_is():
    found = asked(2000)
    assert "batches of 32, 64, 128, 256 on" in found["estimate"]["notes"][-1]
    assert abs(found["estimate"]["expected"] / found["peak"] - 1) < 0.15


@only("tensorflow", because="peaks of a real allocator on a CPU")
def test_whatever_the_steps_wrote_is_put_back(answer):
    assert answer["same"]


def test_it_is_refused_for_a_device_that_is_not_here():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
    model.compile("sgd", "mse")
    with pytest.raises(oomproof.BackendError, match="device at hand"):
        oomproof.estimate(model, 8, gpu="t4", engine="probe")


@only("jax", because="programs planned by XLA")
def test_on_jax_it_is_the_compiler_that_is_asked():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
    model.compile("sgd", "mse")
    with pytest.raises(oomproof.BackendError, match='engine="compile" asks XLA'):
        oomproof.estimate(model, 8, engine="probe")
