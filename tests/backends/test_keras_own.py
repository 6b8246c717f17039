"""Keras's own tests, from the installed wheel, with every model guarded and every batch cut: what passes plain passes.

They run in child processes, with the plugin keras_guarded.py. A selection of its trainer's tests runs with this suite;
`make keras-tests` runs every file of Keras's that trains a model.
"""

import collections
import json
import os
import pathlib
import subprocess
import sys

import keras
import numpy as np
import pytest
from here import BACKEND
from keras.src.models.model import Trainer

import oomproof

HERE = pathlib.Path(__file__).parent
SOURCES = pathlib.Path(keras.__file__).parent / "src"
TRAINER = "trainers.trainer_test"
# What compiles for long, and what is much the same as a test that is left in.
QUICK = "not steps_per and not jit and not data_adapter and not unrolled and not sparse and not retracing"

# Files that train on several devices or processes, which guard refuses, or that need what the wheel does not bring.
LEFT_OUT = {
    "backend.jax.distribution_lib_test",
    "backend.jax.jax_multi_process_distribution_test",
    "backend.tensorflow.distribute_test",
}
# Tests that look at what a guard replaces, each with what it looks at.
EXCEPTED = {
    "tensorflow": {},
    "jax": {
        f"{TRAINER}::TestTrainer::test_fit_eval_flow_for_jax_model_weights": (
            "Keras takes the values out of the variables during fit; a guard leaves them there, so that a step that "
            "fails has them still"
        ),
    },
    "torch": {
        "models.functional_test::FunctionalTest::test_warning_for_mismatched_inputs_structure": (
            "Keras warns once a call; op by op, a batch in pieces is several calls"
        ),
        **{
            f"utils.torch_utils_test::TorchUtilsTest::test_{name}": "torch's own BatchNorm refuses pieces of one sample"
            for name in (
                *("basic_usage1", "load_weights1", "load_weights3", "load_weights_autowrapping", "module_autowrapping"),
                *("serialize_model1", "serialize_model3", "serialize_model_autowrapping"),
            )
        },
    },
}[BACKEND]


class TrainedLayer(Trainer, keras.layers.Dense):
    """What Keras's tests train: all of a model but the name."""

    def __init__(self):
        keras.layers.Dense.__init__(self, 2, kernel_initializer="ones")
        Trainer.__init__(self)
        self.compile(keras.optimizers.SGD(0.1), "mse", metrics=["mae"])


def test_a_layer_with_a_trainer_is_a_model():
    x, y = np.arange(18.0).reshape(6, 3) / 18, np.zeros((6, 2))
    plain, guarded = TrainedLayer(), oomproof.guard(TrainedLayer(), micro_batch_size=2)
    expected = plain.fit(x, y, batch_size=6, verbose=0)
    history = guarded.fit(x, y, batch_size=6, verbose=0)
    assert history.run.plan.micro_batch_size == 2
    for ours, kerass in zip(guarded.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_allclose(ours, kerass, rtol=1e-5)
    for name, values in expected.history.items():
        np.testing.assert_allclose(history.history[name], values, rtol=1e-5)


def test_a_train_step_of_its_own_is_refused():
    class OwnStep(TrainedLayer):
        def train_step(self, *args):
            return super().train_step(*args)

    with pytest.raises(oomproof.UnsupportedModelError, match="OwnStep has its own `train_step`"):
        oomproof.guard(OwnStep())


@pytest.mark.parametrize("kind", [keras.layers.Identity, Trainer])
def test_half_of_a_model_is_none(kind):
    with pytest.raises(TypeError, match=r"Expected a keras.Model\. Received: "):
        oomproof.guard(kind())


def modules_that_train():
    trains = (".fit(", ".train_on_batch(")
    files = [file for file in SOURCES.rglob("*_test.py") if any(call in file.read_text() for call in trains)]
    return sorted({".".join(file.relative_to(SOURCES).with_suffix("").parts) for file in files} - LEFT_OUT)


def outcomes(module, directory, *options, timeout):
    """How each test of one of Keras's files ends, by its name."""
    file = directory / "outcomes.json"
    file.unlink(missing_ok=True)
    # Without our own settings of pytest, which are not Keras's.
    usual = ["-q", "-c", os.devnull, "--rootdir", directory, "-p", "no:cacheprovider", "-W", "ignore", "--tb=short"]
    ours = ["-p", "keras_guarded", "--timeout", "300", "--outcomes", file, *options]
    child = subprocess.run(
        [sys.executable, "-m", "pytest", *usual, *ours, "--pyargs", f"keras.src.{module}"],
        cwd=directory,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), *sys.path])},
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert file.exists(), f"{child.stdout[-3000:]}\n{child.stderr[-3000:]}"
    return json.loads(file.read_text())


def check(module, directory, *options, timeout=540):
    """Runs a file guarded, and plain what fails. Returns how many tests ended how."""
    guarded = outcomes(module, directory, *options, timeout=timeout)
    failed = {name for name, found in guarded.items() if found["outcome"] == "failed"}
    stale = [name for name in EXCEPTED if guarded.get(name, {}).get("outcome") == "passed"]
    assert not stale, f"no exceptions any more: {stale}"
    wrong = failed - set(EXCEPTED)
    if wrong:
        names = directory / "names"
        names.write_text("\n".join(wrong))
        plain = outcomes(module, directory, "--plain", "--names", names, timeout=timeout)
        wrong = {name for name in wrong if plain[name]["outcome"] == "passed"}
    errors = [f"{name}\n{guarded[name]['error']}" for name in sorted(wrong)]
    assert not errors, "\n\n".join(["these pass plain, but not guarded:", *errors])
    counts = collections.Counter(found["outcome"] for found in guarded.values())
    counts["excepted"] = len(failed & set(EXCEPTED))
    counts["failed"] -= counts["excepted"]
    counts["cut"] = sum("cut" in found for found in guarded.values() if found["outcome"] == "passed")
    return counts


def test_a_selection(tmp_path):
    counts = check(TRAINER, tmp_path, "-k", QUICK)
    # Nothing is shown by tests in which no batch was cut.
    assert counts["cut"] > 40, counts


@pytest.mark.keras_own
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("module", modules_that_train())
def test_all(module, tmp_path, capfd):
    counts = check(module, tmp_path, timeout=7200)
    with capfd.disabled():
        print(f"\n{module} on {BACKEND}: {dict(counts)}")
