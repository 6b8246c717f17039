"""How Keras calls us, pinned: runs on the newest and on the oldest supported Keras.

Everything here compares a guarded model, cut into pieces, with the same model under plain Keras.
"""

from __future__ import annotations

import keras
import numpy as np
import pytest
from here import BACKEND, only
from pairs import (
    BATCH,
    MICRO,
    OURS,
    SAMPLES,
    OwnModel,
    X,
    Y,
    assert_same,
    assert_same_history,
    both,
    fit,
    make_model,
)

import oomproof

pytestmark = pytest.mark.seam


# Where our function sits


def test_fit_calls_our_train_function():
    model = oomproof.guard(make_model())
    history = fit(model, epochs=1, validation_data=(X, Y))
    assert history.run.steps == {"train": 5, "test": 5, "predict": 0}


def test_compile_clears_the_function_and_guard_sets_it_again():
    plain, guarded = both()
    for model in (plain, guarded):
        fit(model, epochs=1)
        model.compile(keras.optimizers.SGD(0.1), "mae")
        assert model.train_function is None
        fit(model, epochs=1)
    assert_same(plain, guarded)
    assert fit(guarded, epochs=1).run.steps["train"] == 5


@pytest.mark.filterwarnings("ignore")
def test_quantize_gives_the_predictions_of_a_quantized_model():
    plain, guarded = both()
    before = guarded.predict(X, verbose=0)
    for model in (plain, guarded):
        model.predict(X, verbose=0)
        model.quantize("int8")
    after = guarded.predict(X, verbose=0)
    assert not np.array_equal(before, after)
    np.testing.assert_allclose(plain.predict(X, verbose=0), after, rtol=1e-5, atol=1e-6)


def test_guard_twice_is_harmless_and_the_last_one_counts():
    plain = make_model()
    guarded = oomproof.guard(oomproof.guard(make_model(), micro_batch_size=1), micro_batch_size=MICRO)
    fit(plain), fit(guarded)
    assert_same(plain, guarded)
    assert guarded._oomproof_guard is not None
    assert fit(guarded, epochs=1).run.plan.micro_batch_size == MICRO


def test_unguard_leaves_nothing_behind():
    untouched, model = make_model(), make_model()
    for each in (untouched, model):
        fit(each, epochs=1)
        each.predict(X, verbose=0)
    names, optimizer_names = set(vars(model)), set(vars(model.optimizer))
    oomproof.guard(model, micro_batch_size=MICRO)
    assert set(vars(model)) >= OURS
    fit(model, epochs=1), fit(untouched, epochs=1)
    model.predict(X, verbose=0)
    assert oomproof.unguard(model) is model
    assert set(vars(model)) == names
    assert set(vars(model.optimizer)) == optimizer_names
    assert model.fit.__func__ is keras.Model.fit
    assert model.train_function is model.test_function is model.predict_function is None
    assert not hasattr(fit(model, epochs=1), "run")
    fit(untouched, epochs=1)
    assert_same(untouched, model)
    oomproof.unguard(model)


def test_fit_of_ours_guards_one_call_only():
    plain, model = make_model(), make_model()
    expected = fit(plain)
    history = oomproof.fit(model, X, Y, batch_size=BATCH, micro_batch_size=MICRO, epochs=3, verbose=0, shuffle=False)
    assert_same_history(expected, history)
    assert history.run.steps["train"] == 15
    assert not OURS & set(vars(model))


def test_fit_of_ours_gives_a_guarded_model_back_as_it_was():
    model = oomproof.guard(make_model(), micro_batch_size=2)
    oomproof.fit(model, X, Y, batch_size=BATCH, micro_batch_size=4, verbose=0)
    assert fit(model, epochs=1).run.plan.micro_batch_size == 2


# Models in every state


@pytest.mark.parametrize("make", [OwnModel, lambda: keras.Sequential([keras.layers.Dense(3), keras.layers.Dense(1)])])
def test_models_that_are_not_built_yet(make):
    def compiled():
        keras.utils.set_random_seed(3)
        model = make()
        model.compile("adam", "mse")
        return model

    plain, guarded = both(compiled)
    assert_same_history(fit(plain), fit(guarded))
    assert_same(plain, guarded)


def test_a_model_guarded_before_it_is_compiled():
    plain, guarded = make_model(), oomproof.guard(make_model(compiled=False), micro_batch_size=MICRO)
    guarded.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
    assert_same_history(fit(plain), fit(guarded))
    assert_same(plain, guarded)


def test_predict_of_a_model_that_was_never_compiled():
    plain, guarded = make_model(compiled=False), oomproof.guard(make_model(compiled=False))
    np.testing.assert_array_equal(plain.predict(X, verbose=0), guarded.predict(X, verbose=0))


@pytest.mark.parametrize("where", ["class", "instance"])
def test_an_own_train_step_is_refused_when_guarding(where):
    class Own(OwnModel):
        def train_step(self, data):
            return {}

    model = Own() if where == "class" else OwnModel()
    if where == "instance":
        object.__setattr__(model, "train_step", lambda data: {})
    with pytest.raises(oomproof.UnsupportedModelError, match=r"train_step[\s\S]*oomproof\.gradients"):
        oomproof.guard(model)
    assert not OURS & set(vars(model))


@only("tensorflow", because="`tf.distribute`")
@pytest.mark.filterwarnings("ignore")
def test_a_distributed_model_is_refused():
    import tensorflow as tf

    strategy = tf.distribute.MirroredStrategy(["CPU:0"])
    with strategy.scope():
        model = make_model()
        with pytest.raises(oomproof.UnsupportedModelError, match="MirroredStrategy"):
            oomproof.guard(make_model())
    with pytest.raises(oomproof.UnsupportedModelError, match="MirroredStrategy"):
        oomproof.guard(model)
    guarded = oomproof.guard(make_model())
    with strategy.scope(), pytest.raises(oomproof.UnsupportedModelError, match="MirroredStrategy"):
        fit(guarded)


def test_own_test_and_predict_steps_are_left_to_keras():
    def logs():
        return {"own": keras.ops.convert_to_tensor(42.0)}

    def outputs(data):
        return keras.ops.zeros((keras.ops.shape(keras.tree.flatten(data)[0])[0], 2))

    class Own(OwnModel):
        def test_step(self, data):
            return logs()

        def predict_step(self, data):
            return outputs(data)

    class OwnOnJax(OwnModel):
        """There a step is given the model's values, and returns them."""

        def test_step(self, state, data):
            return logs(), state

        def predict_step(self, state, data):
            return outputs(data), state[1]

    model = OwnOnJax() if BACKEND == "jax" else Own()
    model.compile("adam", "mse")
    oomproof.guard(model, micro_batch_size=MICRO)
    history = fit(model, validation_data=(X, Y))
    assert history.history["val_own"] == [42.0] * 3
    assert model.predict(X, verbose=0).shape == (SAMPLES, 2)
    assert history.run.steps == {"train": 15, "test": 0, "predict": 0}


def test_another_backend_is_refused(monkeypatch):
    monkeypatch.setattr(keras.backend, "backend", lambda: "openvino")
    with pytest.raises(oomproof.BackendError, match="'openvino' backend here; this version of oomproof supports"):
        oomproof.guard(make_model())
