"""Guarded `fit` on arrays: copied as Keras does where there is room, fed in slices where there is not."""

import logging

import keras
import numpy as np
import pytest

import oomproof
from oomproof._machine import host

SAMPLES, BATCH = 100, 32


def model():
    keras.utils.set_random_seed(7)
    net = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8, "tanh"), keras.layers.Dense(1)])
    net.compile(keras.optimizers.SGD(0.1), "mse")
    return net


def arrays(dtype="float32"):
    rng = np.random.default_rng(3)
    return rng.normal(size=(SAMPLES, 4)).astype(dtype), rng.normal(size=(SAMPLES, 1)).astype(dtype)


@pytest.fixture
def full_host(monkeypatch):
    """A host on which not even these few kilobytes are free."""
    monkeypatch.setattr(host, "available", lambda *_: 256)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("weighted", [False, True])
def test_what_is_fed_in_slices_trains_as_the_arrays_do(full_host, caplog, dtype, weighted):
    x, y = arrays(dtype)
    weights = np.linspace(0, 1, SAMPLES).astype("float32") if weighted else None
    plain = model()
    plain.fit(x, y, sample_weight=weights, batch_size=BATCH, epochs=2, shuffle=False, verbose=0)
    guarded = oomproof.guard(model())
    with caplog.at_level(logging.WARNING, "oomproof"):
        history = guarded.fit(x, y, sample_weight=weights, batch_size=BATCH, epochs=2, shuffle=False, verbose=2)
    assert sum("feeding them in slices" in record.message for record in caplog.records) == 1
    assert history.run.steps["train"] == 2 * -(-SAMPLES // BATCH)
    for ours, theirs in zip(guarded.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


def test_shuffled_slices_are_the_same_again_with_the_same_seed(full_host):
    def trained():
        net = oomproof.guard(model())
        net.fit(*arrays(), batch_size=BATCH, epochs=2, verbose=0)
        return net.get_weights()

    first, second = trained(), trained()
    kept = oomproof.guard(model())
    kept.fit(*arrays(), batch_size=BATCH, epochs=2, shuffle=False, verbose=0)
    for one, other in zip(first, second, strict=True):
        np.testing.assert_array_equal(one, other)
    assert any((a != b).any() for a, b in zip(first, kept.get_weights(), strict=True))


def test_arrays_that_fit_are_left_to_keras(caplog):
    with caplog.at_level(logging.WARNING, "oomproof"):
        oomproof.guard(model()).fit(*arrays(), batch_size=BATCH, verbose=2)
    assert not any("slices" in record.message for record in caplog.records)


@pytest.mark.parametrize("arguments", [{"validation_split": 0.2}, {"steps_per_epoch": 2}])
def test_what_only_arrays_can_do_is_left_to_keras(full_host, caplog, arguments):
    with caplog.at_level(logging.WARNING, "oomproof"):
        oomproof.guard(model()).fit(*arrays(), batch_size=BATCH, verbose=2, **arguments)
    assert not any("slices" in record.message for record in caplog.records)
