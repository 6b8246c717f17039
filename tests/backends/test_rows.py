"""The lean update a few rows at a time: the same numbers, bit for bit, as weight by weight; and from less memory."""

from __future__ import annotations

import os
import subprocess
import sys

import keras
import numpy as np
import pytest
from here import only, representative

from oomproof import _backends as backends
from oomproof._backends.common import rows

_OPTIMIZERS = {
    "SGD": {"momentum": 0.9, "nesterov": True},
    "Adam": {"amsgrad": True, "weight_decay": 0.01},
    "AdamW": {"clipnorm": 0.5},
    "Adamax": {},
    "Adadelta": {"learning_rate": 0.5},
    "Adagrad": {},
    "Nadam": {},
    "RMSprop": {"momentum": 0.5, "centered": True},
    "Lion": {"use_ema": True},
    # Of these a row does not go by itself, or not to the last bit.
    "Ftrl": {"l1_regularization_strength": 0.01},
    "Adafactor": {},
    "Lamb": {},
    "Muon": {},
}


@pytest.mark.parametrize("name", representative(_OPTIMIZERS, "SGD", "Adam", "Nadam", "Lion", "Lamb"))
def test_rows_change_no_number(name, monkeypatch):
    whole = _trained(name, monkeypatch, at_once=2**40)
    few = _trained(name, monkeypatch, at_once=2000)
    plain = _trained(name, monkeypatch, at_once=2000, lean=False)
    for one, other, usual in zip(whole, few, plain, strict=True):
        np.testing.assert_array_equal(one, other)
        np.testing.assert_allclose(one, usual, rtol=1e-4, atol=1e-5)


@only("tensorflow", "torch", because="updates a few rows at a time")
def test_large_weights_go_by_rows(monkeypatch):
    seen = []
    bounds = rows.bounds
    monkeypatch.setattr(rows, "bounds", lambda variable: seen.append(len(bounds(variable))) or bounds(variable))
    _trained("Adam", monkeypatch, at_once=2000, steps=1)
    assert max(seen) > 4


_TIGHT = """
import keras, numpy as np, oomproof
model = keras.Sequential([keras.Input((4096,)), keras.layers.Dense(4096), keras.layers.Dense(3)])
model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
x, y = np.ones((32, 4096), "float32"), np.zeros(32, "int32")
run = oomproof.fit(model, x, y, batch_size=32, verbose=0).run
print(run.plan.lean_commit, run.ooms)
"""


@only("tensorflow", because="peaks of a real allocator on a CPU")
def test_an_update_that_fits_in_rows_alone():
    """Weights, slots and gradients of 256 MiB in 400: beside them the update of the one large weight took 192 more."""
    limited = {"TF_CPU_ALLOCATOR_USE_BFC": "true", "TF_CPU_BFC_MEM_LIMIT_IN_MB": "400", "TF_ENABLE_ONEDNN_OPTS": "0"}
    child = subprocess.run(
        [sys.executable, "-c", _TIGHT], env={**os.environ, **limited}, capture_output=True, text=True, timeout=300
    )
    assert child.stdout.split()[-2:] == ["True", "0"], child.stderr[-2000:]


def test_a_learning_rate_that_changes(monkeypatch):
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 1, 0.5)
    monkeypatch.setitem(_OPTIMIZERS, "SGD", {"learning_rate": schedule})
    for whole, few in zip(_trained("SGD", monkeypatch, 2**40), _trained("SGD", monkeypatch, 2000), strict=True):
        np.testing.assert_array_equal(whole, few)


@only("tensorflow", "torch", because="updates a few rows at a time")
@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_an_optimizer_is_as_it_was_after_an_update_that_failed(monkeypatch, error):
    """Its methods and lists, too, and not its values alone: the next step goes on from there."""
    monkeypatch.setattr(rows, "AT_ONCE", 2000)
    model = _model(keras.optimizers.Adam())
    step, data = backends.current().step(model), _batch(np.random.default_rng(0))
    step.prepare(data, "train")
    step.train(data, 3, True, None)
    optimizer = model.optimizer
    before = {name: (id(value), str(value)[:50]) for name, value in vars(optimizer).items()}
    values = [np.array(keras.ops.convert_to_numpy(v)) for v in (*model.variables, *optimizer.variables)]
    put, calls = rows.stand_in, []

    def failing(*arguments):
        put(*arguments)
        calls.append(1)
        if len(calls) == 3:
            raise error

    monkeypatch.setattr(rows, "stand_in", failing)
    with pytest.raises(error):
        step.train(data, 3, True, None)
    assert {name: (id(value), str(value)[:50]) for name, value in vars(optimizer).items()} == before
    for value, variable in zip(values, (*model.variables, *optimizer.variables), strict=True):
        np.testing.assert_array_equal(value, keras.ops.convert_to_numpy(variable))


def test_what_an_update_takes_is_known_before_the_optimizer_is_built():
    model = _model(keras.optimizers.Adam())
    small = rows.work_of_update(model)
    assert small > 0
    model.compile(keras.optimizers.Adam(global_clipnorm=1.0), "mse")
    gradients = sum(4 * int(np.prod(v.shape)) for v in model.trainable_variables)
    assert rows.work_of_update(model) > small + gradients


def test_optimizers_of_ones_own_are_left_alone():
    class Own(keras.optimizers.Adam):
        pass

    assert rows.goes_by_rows(keras.optimizers.Adam())
    assert rows.goes_by_rows(keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam()))
    assert not rows.goes_by_rows(Own())
    assert not rows.goes_by_rows(keras.optimizers.Lamb())
    changed = keras.optimizers.Adam()
    vars(changed)["update_step"] = lambda gradient, variable, rate: None
    assert not rows.goes_by_rows(changed)


def _model(optimizer):
    keras.utils.set_random_seed(1)
    layers = [
        keras.Input((8,), dtype="int32"),
        keras.layers.Embedding(101, 24),
        keras.layers.Conv1D(30, 3),
        keras.layers.Flatten(),
        keras.layers.Dense(40),
        keras.layers.Dense(3),
    ]
    model = keras.Sequential(layers)
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def _batch(rng):
    return backends.current().as_batch(rng.integers(0, 101, (12, 8)).astype("int32"), rng.integers(0, 3, 12), None)


def _trained(name, monkeypatch, at_once, lean=True, steps=3):
    monkeypatch.setattr(rows, "AT_ONCE", at_once)
    optimizer = getattr(keras.optimizers, name)(**_OPTIMIZERS[name])
    model = _model(optimizer)
    step, rng = backends.current().step(model), np.random.default_rng(0)
    for _ in range(steps):
        data = _batch(rng)
        step.prepare(data, "train")
        step.train(data, 3, lean, None)
    kept = [value for value in vars(optimizer).values() if isinstance(value, keras.Variable)]
    return [np.array(keras.ops.convert_to_numpy(v)) for v in (*model.variables, *optimizer.variables, *kept)]
