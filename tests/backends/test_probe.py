"""Estimates by real steps on the device at hand."""

import json
import types

import keras
import oom_memory
import pytest
from here import BACKEND, only

import oomproof
from oomproof._backends.base import Device
from oomproof._estimation.engines import probe
from oomproof._records.trace import Spec


def asked(forks, megabytes):
    printed = forks.run("probe_child", environment=oom_memory.environment(BACKEND, megabytes))
    return json.loads(printed.strip().splitlines()[-1])


@pytest.fixture(scope="module")
def answer(forks):
    return asked(forks, 2000)


@only("tensorflow", because="peaks of a real allocator on a CPU")
def test_what_fits_is_run_as_it_is(answer):
    estimate, peak = answer["estimate"], answer["peak"]
    assert estimate["engine"] == "probe"
    assert estimate["notes"] == ["ran the step itself on CPU:0: 2.0 GiB"]
    assert abs(estimate["expected"] / peak - 1) < 0.1


@only("tensorflow", because="peaks of a real allocator on a CPU")
def test_a_line_through_small_steps_says_what_a_large_one_takes_that_does_not_fit(answer, forks):
    # Less than the step takes, and more than half of it.
    small = asked(forks, 60)
    assert small["peak"] is None
    assert small["same"]
    assert "batches of 32, 64, 128 on" in small["estimate"]["notes"][-1]
    assert small["estimate"]["low"] <= answer["peak"] <= small["estimate"]["high"]
    assert abs(small["estimate"]["expected"] / answer["peak"] - 1) < 0.15


def described(limit):
    """A question about a batch of 80 samples on a device with so many bytes."""
    device = types.SimpleNamespace(describe=lambda: Device("GPU:0", limit, True))
    backend = types.SimpleNamespace(memory=lambda: device)
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    return types.SimpleNamespace(
        backend=backend, model=model, workload=types.SimpleNamespace(x=Spec((80, 1), "float32"), y=None)
    )


@pytest.mark.parametrize(
    ("limit", "fits", "run", "peak", "measured"),
    [
        (1000, 1000, [10, 20, 40, 80], 900, True),
        # The line says 900, and that is not true.
        (950, 500, [10, 20, 40, 80], 951, False),
        # It says that there is no use in trying.
        (800, 800, [10, 20, 40], 900, False),
        # The largest that went through is a fourth of it.
        (400, 400, [10, 20, 40], 900, False),
    ],
)
def test_the_batch_itself_is_tried_where_it_may_fit(monkeypatch, limit, fits, run, peak, measured):
    tried = []

    def real(question, size):
        tried.append(size)
        needed = 100 + 10 * size
        return needed if needed <= fits else None

    monkeypatch.setattr(probe.simulators, "trace", lambda *_: None)
    monkeypatch.setattr(probe, "_peak", real)
    found = probe.answer(described(limit))
    assert tried == run
    assert (found.peak, found.measured) == (peak, measured)
    assert any("ran out of memory" in note for note in found.notes) == (80 in run and not measured)


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
