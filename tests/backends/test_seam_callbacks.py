"""How Keras calls callbacks and copies models, pinned: runs on the newest and on the oldest supported Keras.

Everything here compares a guarded model, cut into pieces, with the same model under plain Keras.
"""

from __future__ import annotations

import copy
import functools
import pickle

import keras
import numpy as np
import pytest
from here import only, out_of_memory
from hooks import Faults, FaultySGD
from pairs import (
    MICRO,
    OURS,
    Everything,
    X,
    Y,
    assert_same,
    assert_same_history,
    assert_same_logs,
    both,
    fit,
    make_model,
)

import oomproof
from oomproof._training.guarded_model import guard_of

pytestmark = pytest.mark.seam


# Callbacks


def test_callbacks_are_called_as_often_and_with_the_same_logs():
    plain, guarded = both()
    calls = []
    for model in (plain, guarded):
        callback = Everything()
        fit(model, callbacks=[callback], validation_data=(X[:10], Y[:10]), validation_batch_size=4)
        model.evaluate(X, Y, batch_size=7, verbose=0, callbacks=[callback])
        model.predict(X, batch_size=7, verbose=0, callbacks=[callback])
        calls.append(callback.calls)
    assert [hook for hook, _ in calls[0]] == [hook for hook, _ in calls[1]]
    for (hook, expected), (_, found) in zip(*calls, strict=True):
        for a, b in zip(expected, found, strict=True):
            if isinstance(a, dict):
                assert_same_logs(a, b)
            else:
                assert a == b, hook


def test_a_fit_that_is_wrapped_to_add_a_callback(monkeypatch):
    """As MLflow's autologging does, whether the batch size is given or not."""
    original, trained = keras.Model.fit, []

    @functools.wraps(original)
    def logged(self, *args, **kwargs):
        logger = keras.callbacks.LambdaCallback(on_train_end=lambda logs: trained.append(self))
        return original(self, *args, **{**kwargs, "callbacks": [*(kwargs.get("callbacks") or []), logger]})

    monkeypatch.setattr(keras.Model, "fit", logged)
    model = oomproof.guard(make_model(), micro_batch_size=MICRO)
    model.fit(X, Y, verbose=0)
    model.fit(X, Y, batch_size=7, verbose=0, callbacks=[keras.callbacks.LambdaCallback()])
    assert trained == [model, model]


def test_a_fit_that_passes_on_what_it_does_not_name_is_told_of_epochs():
    class Task(keras.Sequential):
        def fit(self, x=None, y=None, **rest):
            return super().fit(x, y, **rest)

    model = Task([keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    oomproof.guard(model, micro_batch_size=MICRO)
    seen = []
    driver = guard_of(model)._drivers
    driver.begin_epoch, begin = lambda epoch: (seen.append(epoch), begin(epoch)), driver.begin_epoch
    model.fit(X, Y, epochs=2, verbose=0)
    assert seen == [0, 1]


@pytest.mark.parametrize("form", ["none", "one", "list", "tuple-free list", "CallbackList"])
def test_callbacks_in_every_form_and_not_changed(form):
    model = oomproof.guard(make_model(), micro_batch_size=MICRO)
    callback = keras.callbacks.LambdaCallback()
    given = {"none": None, "one": callback, "list": [callback], "tuple-free list": []}.get(form)
    if form == "CallbackList":
        given = keras.callbacks.CallbackList([callback], add_history=True, model=model)
        before = len(given.callbacks)
    fit(model, callbacks=given, epochs=1)
    if form == "list":
        assert given == [callback]
    if form == "CallbackList":
        assert len(given.callbacks) == before


def test_early_stopping_restores_the_best_weights():
    plain, guarded = both(lambda: make_model(optimizer=keras.optimizers.Adam(0.5)))
    histories = [
        fit(model, epochs=12, validation_split=0.25,
            callbacks=[keras.callbacks.EarlyStopping(patience=2, restore_best_weights=True)])
        for model in (plain, guarded)
    ]  # fmt: skip
    assert len(histories[0].epoch) < 12
    assert histories[0].epoch == histories[1].epoch
    assert_same(plain, guarded, 1e-3)  # A learning rate this high blows rounding up.


def test_model_checkpoint_csv_logger_and_scheduler(tmp_path):
    plain, guarded = both()
    for name, model in (("plain", plain), ("guarded", guarded)):
        fit(
            model,
            callbacks=[
                keras.callbacks.ModelCheckpoint(tmp_path / f"{name}-{{epoch}}.keras"),
                keras.callbacks.CSVLogger(tmp_path / f"{name}.csv"),
                keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.5),
            ],
        )
    for epoch in (1, 3):
        assert_same(*(keras.models.load_model(tmp_path / f"{name}-{epoch}.keras") for name in ("plain", "guarded")))
    rows = [np.genfromtxt(tmp_path / f"{name}.csv", delimiter=",", names=True) for name in ("plain", "guarded")]
    assert rows[0].dtype.names == rows[1].dtype.names
    np.testing.assert_allclose(rows[0]["loss"], rows[1]["loss"], rtol=1e-5)
    assert float(plain.optimizer.learning_rate) == float(guarded.optimizer.learning_rate) == pytest.approx(0.00125)


def test_backup_and_restore_resumes_an_interrupted_fit(tmp_path):
    class Interrupt(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 2:
                raise KeyboardInterrupt

    plain = make_model()
    fit(plain, epochs=5)
    first = oomproof.guard(make_model(), micro_batch_size=MICRO)
    with pytest.raises(KeyboardInterrupt):
        fit(first, epochs=5, callbacks=[keras.callbacks.BackupAndRestore(tmp_path), Interrupt()])
    second = oomproof.guard(make_model(), micro_batch_size=MICRO)
    history = fit(second, epochs=5, callbacks=[keras.callbacks.BackupAndRestore(tmp_path)])
    assert len(history.epoch) == 3
    assert_same(plain, second)


def test_stop_training_in_the_middle_of_an_epoch():
    class Stop(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            self.model.stop_training = batch == 2

    plain, guarded = both()
    assert_same_history(*(fit(model, callbacks=[Stop()]) for model in (plain, guarded)))
    assert_same(plain, guarded)
    assert int(guarded.optimizer.iterations) == 3


# Copies of a guarded model


def test_save_and_load(tmp_path):
    model = oomproof.guard(make_model(), micro_batch_size=MICRO)
    fit(model, epochs=1)
    model.save(tmp_path / "model.keras")
    model.save_weights(tmp_path / "model.weights.h5")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert_same(model, loaded, 0)
    assert not OURS & set(vars(loaded))
    fit(oomproof.unguard(model), epochs=1), fit(loaded, epochs=1)
    assert_same(model, loaded, 1e-6)


@only("tensorflow", "jax", because="export as a SavedModel")
def test_export(tmp_path):
    import tensorflow as tf

    model = oomproof.guard(make_model(), micro_batch_size=MICRO)
    fit(model, epochs=1)
    model.export(tmp_path / "exported", verbose=False)
    served = tf.saved_model.load(tmp_path / "exported")
    np.testing.assert_allclose(served.serve(X), model.predict(X, verbose=0), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "copied",
    [keras.models.clone_model, lambda model: pickle.loads(pickle.dumps(model)), copy.deepcopy],
    ids=["clone", "pickle", "deepcopy"],
)
def test_copies_are_plain_keras(copied):
    model = oomproof.guard(make_model(), micro_batch_size=MICRO)
    fit(model, epochs=1)
    other = copied(model)
    assert other is not model
    assert not OURS & set(vars(other))
    before = [w.copy() for w in model.get_weights()]
    if not other.compiled:
        other.compile("adam", "mse")
    fit(other, epochs=1)
    assert all(np.array_equal(a, b) for a, b in zip(before, model.get_weights(), strict=True))


# Interruptions


@pytest.mark.parametrize(
    ("hook", "error"),
    [
        ("on_train_batch_begin", KeyboardInterrupt),
        ("on_train_batch_end", ZeroDivisionError),
        # What looks like our own trouble, but was raised in a callback, is the user's.
        ("on_train_batch_end", out_of_memory),
        ("on_test_batch_end", KeyboardInterrupt),
    ],
)
def test_an_exception_in_a_callback_leaves_the_model_consistent(hook, error):
    raised = error() if error is out_of_memory else error("stop")

    def fail(*args, **kwargs):
        raise raised

    plain, guarded = both()
    for model in (plain, guarded):
        callback = keras.callbacks.Callback()
        setattr(callback, hook, fail)
        with pytest.raises(type(raised)):
            fit(model, callbacks=[callback], validation_data=(X[:8], Y[:8]))
    assert_same(plain, guarded)
    assert_same_history(fit(plain, epochs=1), fit(guarded, epochs=1))
    assert_same(plain, guarded)
    assert fit(guarded, epochs=1).run.steps["train"] == 5


@pytest.mark.parametrize("after", [0, 2, 3])
def test_a_lean_commit_that_is_interrupted_is_undone(after):
    faults = Faults()
    optimizer = FaultySGD(faults, 0.01, momentum=0.9)
    model = make_model(optimizer=optimizer)
    oomproof.guard(model, plan=oomproof.Plan(micro_batch_size=MICRO, lean_commit=True))
    model.train_on_batch(X[:8], Y[:8])
    variables = [*model.variables, *optimizer.variables]
    before = [keras.ops.convert_to_numpy(v).copy() for v in variables]
    faults.arm("update", after, ZeroDivisionError("stop"))
    with pytest.raises(Exception, match="stop"):
        model.train_on_batch(X[8:16], Y[8:16])
    assert faults.counts["update"] == after + 1
    for variable, value in zip(variables, before, strict=True):
        np.testing.assert_array_equal(keras.ops.convert_to_numpy(variable), value, err_msg=variable.path)


def test_a_lean_commit_computes_the_same():
    plain = make_model()
    guarded = oomproof.guard(make_model(), plan=oomproof.Plan(micro_batch_size=MICRO, lean_commit=True))
    assert_same_history(fit(plain), fit(guarded))
    assert_same(plain, guarded)
