"""The same small model twice, plain and guarded, and what it takes for them to be the same."""

import keras
import numpy as np

import oomproof

SAMPLES, BATCH, MICRO = 36, 8, 3  # Four full batches and a short one; pieces of 3, 3 and 2.
RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(SAMPLES, 5)).astype("float32"), RNG.normal(size=(SAMPLES, 1)).astype("float32")
OURS = {"_oomproof_guard", "fit", "evaluate", "predict", "compile"} | {
    f"{p}_on_batch" for p in ("train", "test", "predict")
}


def make_model(compiled=True, **compile_args):
    keras.utils.set_random_seed(3)
    model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(6, activation="tanh"), keras.layers.Dense(1)])
    if compiled:
        model.compile(**{"optimizer": keras.optimizers.Adam(0.01), "loss": "mse", "metrics": ["mae"], **compile_args})
    return model


class OwnModel(keras.Model):
    """Unbuilt until it sees data."""

    def __init__(self):
        super().__init__()
        self.hidden, self.out = keras.layers.Dense(6, activation="tanh"), keras.layers.Dense(1)

    def call(self, x):
        return self.out(self.hidden(x))


def both(make=make_model, **guarded):
    """The same model twice: plain, and guarded with small pieces."""
    return make(), oomproof.guard(make(), **{"micro_batch_size": MICRO, **guarded})


def fit(model, **kwargs):
    return model.fit(X, Y, **{"batch_size": BATCH, "epochs": 3, "verbose": 0, "shuffle": False, **kwargs})


def assert_same(plain, guarded, tolerance=1e-5):
    for a, b in zip(plain.get_weights(), guarded.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)
    if plain.compiled and plain.optimizer is not None:
        assert int(plain.optimizer.iterations) == int(guarded.optimizer.iterations)


def assert_same_logs(plain, guarded):
    assert plain.keys() == guarded.keys()
    for name, value in plain.items():
        np.testing.assert_allclose(np.array(value), np.array(guarded[name]), rtol=1e-4, atol=1e-6, err_msg=name)


def assert_same_history(plain, guarded):
    assert plain.epoch == guarded.epoch
    assert plain.history.keys() == guarded.history.keys()
    for name, values in plain.history.items():
        np.testing.assert_allclose(values, guarded.history[name], rtol=1e-5, atol=1e-6, err_msg=name)


class Everything(keras.callbacks.Callback):
    """Writes down every call of every kind, with its logs."""

    def __init__(self):
        super().__init__()
        self.calls = []
        for hook in dir(keras.callbacks.Callback):
            if hook.startswith("on_"):
                setattr(self, hook, self.recorder(hook))

    def recorder(self, hook):
        def record(*args, **kwargs):
            flat = [a for a in [*args, *kwargs.values()] if a is not None]
            self.calls.append((hook, [dict(a) if isinstance(a, dict) else a for a in flat]))

        return record
