"""What only JAX has: arrays on several devices, programs kept on disk, steps that fail after they were believed."""

import json
import os
import subprocess
import sys

import keras
import numpy as np
import pytest
from here import only, out_of_memory
from models import check_same, classes, classifier, numbers, train

import oomproof

SHARDED = """
import json
import keras
import numpy as np
import oomproof

keras.distribution.set_distribution(keras.distribution.DataParallel())
rng = np.random.default_rng(0)
x, y = rng.normal(size=(32, 8)).astype("float32"), rng.integers(0, 3, 32)


def trained(**guard):
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(16, "tanh"), keras.layers.Dense(3)])
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    if guard:
        oomproof.guard(model, **guard)
    history = model.fit(x, y, batch_size=16, epochs=3, shuffle=False, verbose=0, validation_data=(x, y))
    model.predict(x, batch_size=16, verbose=0)
    return model, history.history


plain, expected = trained()
answer = {"devices": len(plain.weights[0].value.devices())}
for name, guard in {"whole": {"verbose": 0}, "pieces": {"micro_batch_size": 4}}.items():
    model, history = trained(**guard)
    pairs = zip(plain.get_weights(), model.get_weights(), strict=True)
    answer[name] = max(float(np.max(np.abs(a - b))) for a, b in pairs)
    answer[name + " history"] = max(
        float(np.max(np.abs(np.subtract(expected[key], history[key])))) for key in expected
    )
    answer[name + " devices"] = len(model.weights[0].value.devices())
print("ANSWER" + json.dumps(answer))
"""


def run(code, **environment):
    known = os.environ | {"KERAS_BACKEND": "jax"} | environment
    done = subprocess.run(
        [sys.executable, "-c", code], env=known, capture_output=True, text=True, timeout=300, check=False
    )
    line = next((line for line in done.stdout.splitlines() if line.startswith("ANSWER")), None)
    assert line is not None, done.stderr[-3000:]
    return json.loads(line.removeprefix("ANSWER"))


@only("jax", because="arrays on several devices (`keras.distribution`)")
def test_arrays_on_two_devices():
    answer = run(SHARDED, XLA_FLAGS="--xla_force_host_platform_device_count=2")
    assert answer["devices"] == answer["whole devices"] == answer["pieces devices"] == 2
    for name in ("whole", "whole history", "pieces", "pieces history"):
        assert answer[name] < 1e-5, answer


KEPT = """
import json
import jax
import keras
import numpy as np
import oomproof

jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
events = []
jax.monitoring.register_event_listener(lambda event, **_: events.append(event))
keras.utils.set_random_seed(0)
model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(3)])
model.compile("sgd", "mse")
oomproof.guard(model, micro_batch_size=4)
model.fit(np.ones((16, 8), "float32"), np.ones((16, 3), "float32"), batch_size=16, verbose=0)
print("ANSWER" + json.dumps({"hits": sum("cache_hits" in event for event in events)}))
"""


@only("jax", because="compiled programs kept on disk (`OOMPROOF_CACHE_DIR`)")
def test_programs_are_read_from_disk_in_a_second_run(tmp_path):
    first, second = (run(KEPT, OOMPROOF_CACHE_DIR=str(tmp_path)) for _ in range(2))
    assert second["hits"] > first["hits"]
    assert any((tmp_path / "jax").iterdir())


@only("jax", because="steps that fail after they were believed")
@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("late", [{1}, {2}, {3, 4}, {5}, {9}], ids=str)
def test_steps_that_fail_late_are_undone_and_repeated(late, monkeypatch):
    from oomproof._backends.jax.pending_steps import PendingStep

    original, waited = PendingStep.wait, []

    def wait(step):
        waited.append(step)
        if len(waited) in late:
            raise out_of_memory()
        return original(step)

    expected = train(lambda: classifier(metrics=["accuracy"]), numbers(), classes(), epochs=5)
    monkeypatch.setattr(PendingStep, "wait", wait)
    received = train(lambda: classifier(metrics=["accuracy"]), numbers(), classes(), epochs=5, guard={})
    assert len(waited) > max(late)
    check_same(expected, received)


@only("jax", because="steps that fail after they were believed")
def test_an_error_of_another_kind_that_comes_late_leaves_the_model_readable(monkeypatch):
    from oomproof._backends.jax.pending_steps import PendingStep

    def wait(step):
        raise ValueError("something else")

    monkeypatch.setattr(PendingStep, "wait", wait)
    models = []
    with pytest.raises(ValueError, match="something else"):
        train(lambda: models.append(classifier()) or models[0], numbers(), classes(), epochs=3, guard={})
    assert len(models[0].get_weights()) == 4


@only("jax", because="layers that change places in the lists of values")
def test_keras_does_not_look_through_the_values_of_every_step():
    """It does so with lists that it keeps as an attribute of the model: a millisecond for a few hundred values."""
    seen = []

    class Watch(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            seen.extend(type(values) for values in self._model._jax_state.values())

    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
    model.compile("adam", "mse")
    oomproof.guard(model)
    x = np.ones((8, 4), "float32")
    model.fit(x, x[:, :2], batch_size=4, verbose=0, callbacks=[Watch()])
    assert seen
    assert not any(issubclass(kind, list | tuple) for kind in seen)


_WITHOUT_HOST = """
import jax
devices = jax.local_devices
def local_devices(*given, backend=None, **more):
    if backend == "cpu":
        raise RuntimeError("Unknown backend cpu")
    return devices(*given, **more)
jax.local_devices = local_devices
import keras, numpy as np, oomproof
model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2, "tanh"), keras.layers.Dense(1)])
model.compile("adam", "mse")
oomproof.guard(model, micro_batch_size=3, allow="exact")
x = np.random.default_rng(0).normal(size=(8, 3)).astype("float32")
print(model.fit(x, x[:, :1], batch_size=8, verbose=0).run.exactness.word)
"""


@only("jax", because="proofs on the host")
def test_proofs_run_on_the_device_where_jax_knows_no_host(tmp_path):
    """As with JAX_PLATFORMS=cuda."""
    environment = {**os.environ, "OOMPROOF_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", _WITHOUT_HOST]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert done.stdout.strip() == "exact", done.stderr
