"""Keras's and the framework's own functions are what they were: patches are entered and left."""

import json
import pathlib
import subprocess
import sys

import keras
import pytest
from here import BACKEND

from oomproof._compat.keras import ATTRIBUTES, SOME_HAVE

pytestmark = pytest.mark.seam


def test_functions_are_what_they_were():
    child = pathlib.Path(__file__).with_name("patches_child.py")
    done = subprocess.run([sys.executable, str(child)], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found.pop("compared") > 5000
    assert found.pop("estimate seen")
    # While a stream is there, Keras makes its adapter: plain `fit` asks nobody.
    assert found.pop("stream") == ["keras.src.trainers.data_adapters.PyDatasetAdapter"]
    assert found == {"import": [], "estimate": [], "plan": [], "unguard": [], "stream gone": []}


def objects():
    """One of each kind of object whose private attributes are used, in the state they are used in."""
    inputs = keras.Input((4,))
    outputs = keras.layers.BatchNormalization()(keras.layers.Dropout(0.1)(inputs))
    functional = keras.Model(inputs, outputs)
    functional.compile("adam", "mse", metrics=["mae"])
    functional.fit(keras.ops.ones((2, 4)), keras.ops.ones((2, 4)), verbose=0)
    sequential = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    built = keras.Sequential([keras.layers.Dense(1)])
    built.build((None, 4))
    normalising = functional.layers[-1]
    return {
        "layer": [*functional.layers, functional, built],
        "batch normalization": [normalising],
        "model": [functional],
        "functional model": [functional],
        "sequential model": [sequential],
        "compiled loss": [functional._compile_loss],
        "compiled metrics": [functional._compile_metrics],
        "metric": functional._compile_metrics.metrics,
        "optimizer": [functional.optimizer],
        "variable": functional.variables,
        "data adapter": [keras.src.trainers.data_adapters.py_dataset_adapter.PyDatasetAdapter],
        "model on TensorFlow": [functional],
        "model on JAX": [functional],
    }


@pytest.fixture(scope="module")
def kinds():
    return objects()


@pytest.mark.parametrize("kind", ATTRIBUTES)
def test_private_attributes_are_there(kind, kinds):
    names = {"tensorflow": "TensorFlow", "jax": "JAX", "torch": "torch"}
    if " on " in kind and not kind.endswith(names[BACKEND]):
        assert BACKEND in names  # That of another backend.
        return
    missing = [
        name
        for name in ATTRIBUTES[kind]
        if name not in SOME_HAVE and not any(hasattr(thing, name) for thing in kinds[kind])
    ]
    assert not missing
