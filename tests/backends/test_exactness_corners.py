"""Corners that a review found: each of these once gave a wrong result, or an error where plain Keras trains."""

import threading

import keras
import numpy as np
import pytest
from here import only
from hooks import Faults
from keras import layers, losses, ops
from models import BATCH, FEATURES, check_exact, made, train

import oomproof

pytestmark = pytest.mark.usefixtures("float64")


def numbers(*shape):
    return np.random.default_rng(3).normal(size=shape)


X, Y = numbers(29, FEATURES), numbers(29, 1)


def dense(*inner, loss="mse", optimizer=None, **compiling):
    model = keras.Sequential([keras.Input((FEATURES,)), layers.Dense(4), *inner])
    model.compile(optimizer or keras.optimizers.SGD(0.1), loss, **compiling)
    return model


class LossInside(layers.Layer):
    def call(self, inputs):
        self.add_loss(losses.MeanSquaredError()(ops.zeros_like(inputs), inputs))
        return inputs


class LossWhileTraining(layers.Layer):
    def call(self, inputs, training=False):
        if training:
            self.add_loss(ops.mean(ops.square(inputs)))
        return inputs


class MaskFromCall(layers.Layer):
    def call(self, inputs):
        outputs = inputs * 1.0
        keras.src.backend.set_keras_mask(outputs, inputs[..., 0] > 0)
        return outputs


class OddLoss(layers.Layer):
    def call(self, inputs):
        self.add_loss(ops.sqrt(ops.mean(ops.square(inputs))))
        return inputs


def test_a_keras_loss_inside_of_the_model():
    check_exact(lambda: dense(LossInside(), layers.Dense(1)), X, Y)


def test_an_optimizer_with_its_own_apply_gradients():
    class Tenth(keras.optimizers.SGD):
        def apply_gradients(self, grads_and_vars):
            return super().apply_gradients([(g / 10, v) for g, v in grads_and_vars])

    check_exact(lambda: dense(layers.Dense(1), optimizer=Tenth(0.1)), X, Y)


@pytest.mark.parametrize("loss", ["mse", losses.MeanSquaredError(reduction="sum"), "kl_divergence"])
def test_outputs_that_are_samples_and_nothing_else(loss):
    def build():
        return dense(layers.Dense(1, "sigmoid"), layers.Reshape(()), loss=loss, metrics=["mae", "accuracy"])

    check_exact(build, X, np.abs(Y[:, 0]), sample_weight=np.abs(numbers(29)))


def test_a_loss_that_is_only_there_while_training():
    check_exact(lambda: dense(LossWhileTraining(), layers.Dense(1)), X, Y, validation_split=0.3)


@only("tensorflow", "jax", because="several outputs whose only loss is from `add_loss`")
def test_losses_from_add_loss_alone():
    def build():
        inputs = keras.Input((FEATURES,))
        hidden = LossInside()(layers.Dense(3)(inputs))
        model = keras.Model(inputs, [hidden, layers.Dense(1)(hidden)])
        model.compile(keras.optimizers.SGD(0.1), loss=[None, None])
        return model

    check_exact(build, X, [numbers(29, 3), Y])


def test_a_mask_that_no_layer_announced():
    def build():
        inputs = keras.Input((5, FEATURES))
        model = keras.Model(inputs, MaskFromCall()(layers.Dense(2)(inputs)))
        model.compile(keras.optimizers.SGD(0.1), "mse")
        return model

    check_exact(build, numbers(29, 5, FEATURES), numbers(29, 5, 2))


@pytest.mark.proven
def test_a_loss_that_uses_what_call_has_kept_is_not_exact():
    class Keeps(keras.Model):
        def __init__(self):
            super().__init__()
            self.inner, self.head = layers.Dense(3), layers.Dense(1)

        def call(self, inputs):
            self.kept = self.inner(inputs)
            return self.head(self.kept)

        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
            return ops.mean(ops.square(y - y_pred)) + ops.mean(ops.square(self.kept))

    def build():
        model = Keeps()
        model.compile("sgd")
        return model

    with pytest.raises(oomproof.CannotFitError, match=r"compute_loss may use more than it is given"):
        train(build, X, Y, guard={"micro_batch_size": 3, "allow": "exact"}, mode="eager")
    with pytest.warns(oomproof.InexactWarning, match="compute_loss"):
        train(build, X, Y, guard={"micro_batch_size": 3}, mode="eager")


@pytest.mark.proven
def test_exact_only_refuses_an_odd_loss_before_the_first_step():
    model = made(lambda: dense(OddLoss(), layers.Dense(1)))
    oomproof.guard(model, micro_batch_size=3, allow="exact")
    with pytest.raises(oomproof.CannotFitError, match="add_loss"):
        model.fit(X, Y, batch_size=BATCH, verbose=0)
    assert int(model.optimizer.iterations) == 0


def test_pieces_that_are_not_allowed():
    model = made(lambda: dense(layers.Dense(1)))
    oomproof.guard(model, micro_batch_size=3, allow=set())
    with pytest.raises(oomproof.CannotFitError, match="microbatch"):
        model.fit(X, Y, batch_size=BATCH, verbose=0)


def test_models_train_side_by_side_in_threads():
    """What oomproof puts in Keras's place is seen by the thread that needs it, and by no other."""
    plain = float(losses.MeanSquaredError()(np.ones((4, 1)), np.zeros((4, 1))))
    wrong, done = [], threading.Event()

    def watch():
        while not done.is_set():
            if float(losses.MeanSquaredError()(np.ones((4, 1)), np.zeros((4, 1)))) != plain:
                wrong.append("loss")

    model = made(lambda: dense(layers.Dense(1)), mode="eager")
    oomproof.guard(model, micro_batch_size=3)
    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        model.fit(X, Y, batch_size=BATCH, epochs=2, verbose=0)
    finally:
        done.set()
        watcher.join()
    assert not wrong


def test_logs_are_there_before_anything_is_written():
    """A metric's result that runs out of memory must not come after the commit: the batch would be trained twice."""
    faults = Faults()

    class Fails(keras.metrics.Mean):
        def result(self):
            return faults.at(ops.convert_to_tensor(super().result()), "result")

        def update_state(self, y_true, y_pred, sample_weight=None):
            super().update_state(ops.mean(y_pred))

    model = made(lambda: dense(layers.Dense(1), metrics=[Fails(name="fails")]))
    oomproof.guard(model)
    model.predict(X[:2], verbose=0)
    before = [np.array(ops.convert_to_numpy(v)) for v in model.variables]
    faults.arm("result", 0, ZeroDivisionError("no result"))
    with pytest.raises(Exception, match="no result"):
        model.fit(X, Y, batch_size=BATCH, verbose=0)
    after = [np.array(ops.convert_to_numpy(v)) for v in model.variables]
    assert all(np.array_equal(a, b) for a, b in zip(before, after, strict=True))
    assert int(model.optimizer.iterations) == 0
