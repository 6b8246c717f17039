"""The fixed part of the fuzzer (tests/fuzz): a few configurations, the same ones each time. `make fuzz` runs others."""

import dataclasses
import pathlib
import runpy

import keras
import pytest
from here import BACKEND
from keras.src.backend.common import dtypes

from fuzz.grammar import configuration
from fuzz.running import run
from fuzz.writing import script

SEED = 0
# Chosen for what they hold and for how long they take: about a minute together.
CHOSEN = {"tensorflow": [0], "jax": [0], "torch": [0]}[BACKEND]


@pytest.fixture(autouse=True)
def precision_as_it_was():
    """Scripts set the precision they need."""
    floatx, policy, wide = keras.config.floatx(), keras.config.dtype_policy(), dict(dtypes.BIT64_TO_BIT32_DTYPE)
    yield
    keras.config.set_floatx(floatx)
    keras.config.set_dtype_policy(policy)
    dtypes.BIT64_TO_BIT32_DTYPE.update(wide)
    if BACKEND == "jax":
        import jax

        jax.config.update("jax_enable_x64", False)


@pytest.mark.parametrize("index", CHOSEN)
def test_plain_and_guarded_are_the_same_training(index):
    found = run(configuration(SEED, index, BACKEND))
    assert found["status"] in ("same", "not compared"), found


SMALL = {
    **configuration(SEED, 0, BACKEND),
    "precision": "float64",
    "family": "sequential",
    "inputs": [{"kind": "numbers", "shape": [4]}],
    "blocks": [],
    "outputs": [
        {
            "kind": "numbers",
            "layers": [{"call": "layers.Dense", "args": [2]}],
            "loss": "mse",
            "metrics": [],
            "weighted_metrics": [],
        }
    ],
    "named": False,
    "optimizer": {"call": "optimizers.SGD", "learning_rate": 0.05},
    "compile": {},
    "weights": None,
    "samples": 6,
    "batch": 4,
    "form": "arrays",
    "acts": [{"do": "fit", "epochs": 1, "callbacks": []}],
    "guard": {"micro": 3, "recompute": [], "lean": False, "ooms": {}, "before_compile": False, "head": None},
}


def outcome_of(tmp_path, **changes):
    """What a small case comes to when the functions that it is made of are changed."""
    path = pathlib.Path(tmp_path, "fuzzed.py")
    path.write_text(script(SMALL))
    found = runpy.run_path(str(path))
    made = {name: change(getattr(found["CASE"], name)) for name, change in changes.items()}
    return found["outcome"](dataclasses.replace(found["CASE"], **made))


def test_the_same_training_is_found_to_be_the_same(tmp_path):
    assert outcome_of(tmp_path)["status"] == "same"


def is_guarded(model):
    return hasattr(model, "_oomproof_guard")


def test_a_small_difference_is_found(tmp_path):
    """The guarded side trains a millionth faster."""

    def make(train):
        def faster(model, data, log):
            if is_guarded(model):
                model.optimizer.learning_rate = 0.05 * (1 + 1e-6)
            return train(model, data, log)

        return faster

    found = outcome_of(tmp_path, train=make)
    assert found["status"] == "different"
    assert any("kernel" in line for line in found["details"])


def test_an_error_of_one_side_is_found(tmp_path):
    def failing_when(guarded, error):
        def make(train):
            def fails(model, data, log):
                if is_guarded(model) == guarded:
                    raise error("mine")
                return train(model, data, log)

            return fails

        return make

    assert outcome_of(tmp_path, train=failing_when(True, ZeroDivisionError))["status"] == "raised"
    # What Keras refuses has to be refused; what it fails at may well go.
    assert outcome_of(tmp_path, train=failing_when(False, ValueError))["status"] == "did not raise"
    assert outcome_of(tmp_path, train=failing_when(False, ZeroDivisionError))["status"] == "plain failed"
