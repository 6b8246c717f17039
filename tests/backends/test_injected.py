"""Errors put into every point of a step, on every backend: an out-of-memory error changes nothing but the pieces, and
any other error leaves the model as it was after the last batch that was finished.

The errors are raised from inside of the program (hooks.py), so they arrive as the framework's own do.
"""

import time

import keras
import numpy as np
import pytest
from here import crossed, modes, only, out_of_memory, representative
from hooks import Faults, Faulty, FaultySGD, watched
from keras import layers, ops
from models import (
    BATCH,
    FEATURES,
    check_same,
    classes,
    classifier,
    compiled,
    force_pieces,
    forget_failures,
    made,
    numbers,
    snapshot,
    train,
)

import oomproof

pytestmark = pytest.mark.usefixtures("float64")

# With pieces of 4 samples a batch of 12 has three of them, and the model has four variables.
IN_PIECES = [
    ("before", 0),
    *(("forward", piece) for piece in range(3)),
    *(("backward", piece) for piece in range(3)),
    *(("update", variable) for variable in range(4)),
]
WHOLE = [("before", 0), ("forward", 0), ("backward", 0), ("update", 0), ("update", 3)]
# Predictions of all pieces come first, gradients of all pieces after them.
GATHERED = [*(("forward", call) for call in range(6)), *(("backward", call) for call in range(3))]


def mixing(y_true, y_pred):
    return -ops.mean(ops.log(ops.take_along_axis(y_pred, ops.cast(y_true, "int32")[:, None], axis=-1)))


def faulty(faults, *inner, **options):
    optimizer = FaultySGD(faults, 0.05, momentum=0.9)
    return classifier(Faulty(faults), *inner, optimizer=optimizer, metrics=["accuracy"], **options)


def samples_for(points):
    """A batch for each point, and a short one behind them."""
    samples = BATCH * len(points) + 5
    return numbers(samples), classes(samples)


class Failing(keras.callbacks.Callback):
    """Makes each batch fail once, at the next of these points; the ones behind them go through."""

    def __init__(self, faults, points, hook="train", error=out_of_memory):
        super().__init__()
        self.faults, self.points, self.error, self.done = faults, points, error, []
        setattr(self, f"on_{hook}_batch_begin", self.begin)
        setattr(self, f"on_{hook}_batch_end", self.end)

    def begin(self, batch, logs=None):
        step = self.model._oomproof_guard._driver.step
        if "train" not in vars(step):
            original = step.train

            def train(*args):
                self.faults.reached("before")
                return original(*args)

            step.train = train
        forget_failures(self.model)
        self.faults.disarm()
        if len(self.done) < len(self.points) and self.points[len(self.done)] is not None:
            self.faults.arm(*self.points[len(self.done)], self.error())

    def end(self, batch, logs=None):
        self.done.append(self.faults.raised)


CASES = {
    "whole": ({}, WHOLE, {}),
    "in pieces": ({"micro_batch_size": 4}, IN_PIECES, {}),
    "gathered": ({"micro_batch_size": 4}, GATHERED, {"loss": mixing}),
    "head in parts": ({"plan": oomproof.Plan(head="faulty[1]", head_parts=3)}, IN_PIECES, {}),
}


PLACES = [(case, mode) for case in CASES for mode in modes("graph", "eager")]
ESSENTIAL = [
    ("whole", "eager"),
    ("whole", "graph"),
    ("in pieces", "graph"),
    ("gathered", "graph"),
    ("head in parts", "graph"),
]


@pytest.mark.parametrize("place", representative(PLACES, *ESSENTIAL), ids="-".join)
def test_out_of_memory_at_every_point_of_a_step(place):
    case, mode = place
    guard, points, options = CASES[case]
    faults = Faults()
    data = samples_for(points)
    expected = train(lambda: faulty(faults, **options), *data, mode="eager")
    failing = Failing(faults, points)
    received = train(lambda: faulty(faults, **options), *data, guard=guard, mode=mode, callbacks=[failing])
    assert failing.done == [True] * len(points) + [False]
    assert received["iteration"] == len(points) + 1
    check_same(expected, received)


def test_out_of_memory_while_a_program_is_made():
    """The second batch is the first that is cut, so its program is traced and compiled only then."""
    faults = Faults()
    data = samples_for([0, 0])
    expected = train(lambda: faulty(faults), *data, mode="eager")

    class CutsTheSecond(Failing):
        def begin(self, batch, logs=None):
            super().begin(batch, logs)
            current = self.model._oomproof_guard._driver.training.current
            if batch > 0:
                current.volumes["train"] = 4 * current._unit

    failing = CutsTheSecond(faults, [None, ("tracing", 0)])
    received = train(lambda: faulty(faults), *data, guard={}, callbacks=[failing])
    assert failing.done == [False, True, False]
    check_same(expected, received)


@pytest.mark.parametrize("size", [None, 5], ids=["whole", "in pieces"])
def test_out_of_memory_in_validation(size):
    points = [("forward", 0)] * 2 if size is None else [("forward", piece) for piece in range(3)]
    faults = Faults()
    data = samples_for([0])
    more = {"validation_data": samples_for(points), "validation_batch_size": BATCH}
    expected = train(lambda: faulty(faults), *data, mode="eager", **more)
    failing = Failing(faults, points, "test")
    model = oomproof.guard(made(lambda: faulty(faults)))
    if size is not None:
        force_pieces(model, size)
    history = model.fit(*data, batch_size=BATCH, shuffle=False, verbose=0, callbacks=[failing], **more)
    assert failing.done == [True] * len(points) + [False]
    assert {event.phase for event in history.run.events} == {"test"}
    check_values(expected.history, history.history)
    check_values(expected.variables, snapshot(model))


@pytest.mark.parametrize("size", [None, 5], ids=["whole", "in pieces"])
def test_out_of_memory_in_predict(size):
    points = [("forward", 0)] * 2 if size is None else [("forward", piece) for piece in range(3)]
    faults = Faults()
    x, _ = samples_for(points)
    expected = made(lambda: faulty(faults), "eager").predict(x, batch_size=BATCH, verbose=0)
    model = oomproof.guard(made(lambda: faulty(faults)))
    if size is not None:
        force_pieces(model, size)
    failing = Failing(faults, points, "predict")
    received = model.predict(x, batch_size=BATCH, verbose=0, callbacks=[failing])
    assert failing.done == [True] * len(points) + [False]
    np.testing.assert_allclose(received, expected, atol=1e-12)


def check_values(expected, received):
    assert list(expected) == list(received)
    for name, value in expected.items():
        np.testing.assert_allclose(received[name], value, atol=1e-9, err_msg=name)


# Random numbers


class DrawsGlobally(layers.Layer):
    """Draws from Keras's global generator, which belongs to no layer."""

    def call(self, x):
        return x + 0.1 * keras.random.normal(ops.shape(x), dtype=x.dtype)


class TorchDropout(layers.Layer):
    """Draws from torch's global generator, which Keras knows nothing of."""

    def call(self, x, training=False):
        import torch

        return torch.nn.functional.dropout(x, 0.5, training=bool(training))


RANDOM = {
    "Dropout": lambda: layers.Dropout(0.5),
    "Keras's global generator": DrawsGlobally,
    "torch's global generator": TorchDropout,
}
MARKS = {
    "Keras's global generator": [only("tensorflow", "torch", because="random numbers from Keras's global generator")],
    "torch's global generator": [only("torch", because="random numbers from the framework's own generator")],
}


@pytest.mark.parametrize("mode", modes("graph", "eager"))
@pytest.mark.parametrize("kind", [pytest.param(kind, marks=MARKS.get(kind, [])) for kind in RANDOM])
def test_the_second_try_draws_the_same_numbers(kind, mode):
    points = [("forward", 2), ("backward", 1), ("update", 1)]

    def run(points):
        faults = Faults()
        # The generators stand before and behind the point that fails.
        model = made(lambda: faulty(faults, RANDOM[kind]()), mode)
        oomproof.guard(model)
        force_pieces(model, 4)
        callbacks = [Failing(faults, points)]
        model.fit(*samples_for([0, 0, 0]), batch_size=BATCH, shuffle=False, verbose=0, callbacks=callbacks)
        return callbacks[0].done, snapshot(model)

    (none, expected), (all_, received) = run([]), run(points)
    assert none == [False] * 4
    assert all_ == [True] * 3 + [False]
    for name, value in expected.items():
        np.testing.assert_allclose(received[name], value, atol=1e-12, err_msg=name)


# Errors that are not about memory


@pytest.mark.parametrize(
    ("batch", "point"), crossed([0, 2], [("before", 0), ("forward", 1), ("backward", 2), ("update", 2)])
)
def test_another_error_leaves_the_model_as_after_the_last_finished_batch(batch, point, tmp_path):
    error = KeyboardInterrupt if point[0] == "before" else ZeroDivisionError
    faults = Faults()
    x, y = samples_for([0, 0, 0])
    fit = {"batch_size": BATCH, "shuffle": False, "verbose": 0}
    model = oomproof.guard(made(lambda: faulty(faults)), micro_batch_size=4)
    failing = Failing(faults, [*[None] * batch, point], error=lambda: error("mine"))
    with pytest.raises(BaseException, match="mine"):
        model.fit(x, y, callbacks=[failing], **fit)
    assert failing.done == [False] * batch
    faults.disarm()
    plain = made(lambda: faulty(faults), "eager")
    if batch:
        plain.fit(x[: BATCH * batch], y[: BATCH * batch], **fit)
    for a, b in zip(plain.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-9)
    assert int(model.optimizer.iterations) == batch
    model.save_weights(tmp_path / "kept.weights.h5")
    # And it goes on from there.
    for each in (plain, model):
        each.fit(x[BATCH * batch :], y[BATCH * batch :], **fit)
    check_values(snapshot(plain), snapshot(model))


class Reports(layers.Layer):
    """Has an effect on the way, and goes on with what it was given."""

    def __init__(self, effect):
        super().__init__()
        object.__setattr__(self, "effect", effect)

    def call(self, x):
        watched(x, self.effect)
        return x


@only("tensorflow", "torch", because="effects inside of a layer whose result nobody takes")
@pytest.mark.parametrize("size", ["auto", 4], ids=["whole", "in pieces"])
def test_an_effect_that_fails_late_is_waited_for(size):
    """A graph runs it beside everything else: what is written must not be written before it has succeeded."""
    fails = []

    def effect(value):
        if fails:
            time.sleep(0.3)
            raise ZeroDivisionError("mine")

    model = oomproof.guard(made(lambda: classifier(Reports(effect))), micro_batch_size=size)
    model.train_on_batch(numbers(BATCH), classes(BATCH))
    before = snapshot(model)
    fails.append(True)
    with pytest.raises(BaseException, match="mine"):
        model.train_on_batch(numbers(BATCH), classes(BATCH))
    for name, value in snapshot(model).items():
        np.testing.assert_array_equal(value, before[name], err_msg=name)


@pytest.mark.parametrize("method", ["evaluate", "predict"])
def test_another_error_in_evaluate_and_predict_leaves_the_weights(method, tmp_path):
    faults = Faults()
    x, y = samples_for([0])
    model = oomproof.guard(made(lambda: faulty(faults)))
    before = [weight.copy() for weight in model.get_weights()]
    data = (x, y) if method == "evaluate" else (x,)
    hook = {"evaluate": "test", "predict": "predict"}[method]
    failing = Failing(faults, [("forward", 0)], hook, error=lambda: ZeroDivisionError("mine"))
    with pytest.raises(Exception, match="mine"):
        getattr(model, method)(*data, batch_size=BATCH, verbose=0, callbacks=[failing])
    faults.disarm()
    for a, b in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)
    model.save_weights(tmp_path / "kept.weights.h5")
    getattr(model, method)(*data, batch_size=BATCH, verbose=0)


# Nothing helps


@pytest.mark.parametrize(("point", "batch"), crossed(["forward", "update"], [0, 2]))
def test_not_even_one_sample_fits(point, batch, tmp_path):
    faults = Faults()
    x, y = samples_for([0, 0, 0])
    model = oomproof.guard(made(lambda: faulty(faults)))
    failing = Failing(faults, [*[None] * batch, (point, None)])
    with pytest.raises(oomproof.RecoveryFailedError, match="does not fit") as caught:
        model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0, callbacks=[failing])
    faults.disarm()
    assert caught.value.run.steps["train"] == batch
    assert caught.value.run.events[-1].after is None
    assert caught.value.history is not None
    assert isinstance(caught.value.__cause__, type(out_of_memory()))
    assert caught.value.diagnosis.is_memory
    assert int(model.optimizer.iterations) == batch
    plain = made(lambda: faulty(faults), "eager")
    if batch:
        plain.fit(x[: BATCH * batch], y[: BATCH * batch], batch_size=BATCH, shuffle=False, verbose=0)
    for a, b in zip(plain.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-9)
    model.save_weights(tmp_path / "kept.weights.h5")


# What is said and kept is the same whatever the backend


def test_the_same_lines_and_the_same_record(caplog):
    faults = Faults()
    model = oomproof.guard(
        made(lambda: compiled(keras.Sequential([layers.Input((FEATURES,)), Faulty(faults), layers.Dense(3)]), "mse"))
    )

    class TwiceInTheSecond(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            if batch == 1:
                step = self.model._oomproof_guard._driver.step
                original = step.train

                def train(data, pieces, *rest):
                    if pieces < 4:
                        raise out_of_memory()
                    return original(data, pieces, *rest)

                step.train = train

    run = model.fit(numbers(48), numbers(48, 3), batch_size=16, verbose=2, callbacks=[TwiceInTheSecond()]).run
    assert [record.getMessage() for record in caplog.records if record.name == "oomproof"] == [
        "oomproof: batch 16 now runs as 2 × 8: ran out of memory, an unknown amount free; step 1, nothing lost",
        "oomproof: batch 16 now runs as 4 × 4: ran out of memory, an unknown amount free; step 1, nothing lost",
    ]
    found = run.to_dict()
    assert found.pop("seconds") > 0
    assert found.pop("host_peak") > 0
    backend, versions = found.pop("backend"), found.pop("versions")
    assert backend == keras.backend.backend()
    assert set(versions) == {"oomproof", "keras", backend}
    events = found.pop("events")
    assert [(e["kind"], e["phase"], e["epoch"], e["step"], e["before"], e["after"]) for e in events] == [
        ("oom", "train", 0, 1, 16, 8),
        ("oom", "train", 0, 1, 8, 4),
    ]
    device = found.pop("device")
    assert (device["name"], device["limit"]) == ("CPU:0", None)
    assert found == {
        "budget": None,
        "plan": oomproof.Plan(micro_batch_size=4, exactness=oomproof.Exactness()).to_dict(),
        "steps": {"train": 3, "test": 0, "predict": 0},
        "peak": None,
        "exactness": oomproof.Exactness().to_dict(),
    }
