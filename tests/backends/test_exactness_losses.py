"""Losses: every reduction, weighting and kind of added loss gives the gradient of the whole batch."""

import keras
import numpy as np
import pytest
from here import crossed, only, representative
from keras import layers, ops
from models import (
    CLASSES,
    FEATURES,
    SAMPLES,
    STEPS,
    check_exact,
    classes,
    classifier,
    compiled,
    made,
    numbers,
    regressor,
    tagger,
    tags,
    weights,
    words,
)

import oomproof

pytestmark = pytest.mark.usefixtures("float64")

REDUCTIONS = [
    *("sum", "sum_over_batch_size", "mean", "mean_with_sample_weight"),
    *(pytest.param(none, marks=only("tensorflow", because='`reduction="none"`')) for none in ("none", None)),
]
PLAIN_FUNCTIONS = {
    "scalar": lambda y_true, y_pred: ops.mean(ops.square(y_true - y_pred)) + ops.max(y_pred),
    "per sample": lambda y_true, y_pred: ops.mean(ops.abs(y_true - y_pred), axis=-1),
}
# Made anew for each test: a loss takes its precision when it is made.
MIXING = {
    "dice": lambda: keras.losses.Dice(),
    "dice by name": lambda: "dice",
    "dice by class": lambda: keras.losses.Dice(axis=0),
    "dice by class, counted from the end": lambda: keras.losses.Dice(axis=(-2,)),
    "dice by sample": lambda: keras.losses.Dice(axis=1),
    "tversky": lambda: keras.losses.Tversky(alpha=0.3, beta=0.7),
    "cosine over samples": lambda: keras.losses.CosineSimilarity(axis=0),
}


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_reductions_of_masked_sequences(reduction, weighted):
    def build():
        return tagger(loss=keras.losses.SparseCategoricalCrossentropy(reduction=reduction))

    options = {"mode": "graph", "sample_weight": weights(SAMPLES, STEPS)} if weighted else {"mode": "eager"}
    check_exact(build, words(), tags(), **options)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_reductions_with_sample_weights(reduction):
    check_exact(
        lambda: regressor(loss=keras.losses.MeanSquaredError(reduction=reduction)),
        numbers(),
        numbers(width=2, seed=1),
        sample_weight=weights(),
        micro=5,
    )


def test_class_weights():
    check_exact(classifier, numbers(), classes(), class_weight={0: 0.2, 1: 1.0, 2: 3.5})


def test_class_weights_and_weighted_mean():
    loss = keras.losses.SparseCategoricalCrossentropy(reduction="mean_with_sample_weight")
    check_exact(lambda: classifier(loss=loss), numbers(), classes(), class_weight={0: 0.2, 1: 1.0, 2: 3.5})


@pytest.mark.parametrize("mask_zero", [False, True])
def test_ignored_class(mask_zero):
    loss = keras.losses.SparseCategoricalCrossentropy(ignore_class=0)
    check_exact(lambda: tagger(mask_zero=mask_zero, loss=loss), words(), tags())


@pytest.mark.parametrize("name", representative(MIXING, "dice", "dice by class", "cosine over samples"))
def test_losses_that_mix_samples(name):
    targets = (numbers(width=2, seed=1) > 0).astype("float64")
    check_exact(lambda: regressor(activation="sigmoid", loss=MIXING[name]()), numbers(), targets)


def test_circle_loss():
    check_exact(
        lambda: regressor(layers.Dense(3), layers.UnitNormalization(), loss=keras.losses.Circle()), numbers(), classes()
    )


@pytest.mark.parametrize(("name", "weighted"), crossed(PLAIN_FUNCTIONS, [False, True]))
def test_own_loss_functions(name, weighted):
    loss = PLAIN_FUNCTIONS[name]
    check_exact(
        lambda: regressor(loss=loss), numbers(), numbers(width=2, seed=1), sample_weight=weights() if weighted else None
    )


class SumAndMax(keras.losses.Loss):
    def call(self, y_true, y_pred):
        return ops.sum(ops.square(y_true - y_pred), axis=-1) + ops.max(y_pred)


def test_own_loss_class():
    check_exact(lambda: regressor(loss=SumAndMax()), numbers(), numbers(width=2, seed=1))


def test_mixing_loss_on_masked_sequences():
    """The gathered predictions carry their mask."""
    check_exact(lambda: tagger(loss=lambda y, p: ops.square(ops.cast(y, p.dtype) - p[..., 0])), words(), tags())


def test_mixing_losses_of_several_outputs_are_shown_as_keras_weights_them():
    """By the number of samples where that is known while tracing, as it is here."""

    def build():
        inputs = layers.Input((FEATURES,))
        outputs = {name: layers.Dense(2, "sigmoid", name=name)(inputs) for name in ("a", "b")}
        return compiled(keras.Model(inputs, outputs), loss={"a": keras.losses.Dice(), "b": "mse"})

    logs = []
    for guarded in (False, True):
        model = made(build)
        if guarded:
            oomproof.guard(model, micro_batch_size=2, verbose=0)
        for samples in (9, 3):
            x, y = numbers(samples), {name: np.abs(numbers(samples, width=2, seed=1)) for name in ("a", "b")}
            logs.append(model.train_on_batch(x, y, return_dict=True))
    for plain, guarded in zip(logs[:2], logs[2:], strict=True):
        assert guarded == pytest.approx(plain, rel=1e-5)


class Adds(layers.Layer):
    """Adds one of several kinds of loss."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind

    def build(self, shape):
        self.scale = self.add_weight(shape=(shape[-1],), initializer="ones")

    def call(self, x):
        x = x * self.scale
        if self.kind == "mean":
            self.add_loss(0.3 * ops.mean(ops.square(x)))
        elif self.kind == "sum":
            self.add_loss(0.3 * ops.sum(ops.square(x)))
        elif self.kind == "of weights":
            self.add_loss(0.3 * ops.sum(ops.square(self.scale)))
        elif self.kind == "two":
            self.add_loss(ops.mean(ops.abs(x)))
            self.add_loss(0.1 * ops.sum(x))
        elif self.kind == "per sample":
            self.add_loss(0.1 * ops.sum(ops.square(x), axis=-1))
        return x


@pytest.mark.parametrize(
    ("kind", "way"), crossed(["mean", "sum", "of weights", "two", "per sample"], ["streamed", "gathered"])
)
def test_added_losses(kind, way):
    mode, loss = {"streamed": ("graph", "mse"), "gathered": ("eager", PLAIN_FUNCTIONS["scalar"])}[way]
    check_exact(lambda: regressor(Adds(kind), loss=loss), numbers(), numbers(width=2, seed=1), mode=mode)


def test_added_loss_that_starts_at_zero():
    """Zero says nothing about how a loss splits: a later batch must."""
    check_exact(lambda: classifier(layers.Dense(5, kernel_initializer="zeros"), Adds("sum")), numbers(), classes())


def test_added_loss_alone():
    def build():
        model = keras.Sequential([layers.Input((FEATURES,)), layers.Dense(3), Adds("mean")])
        return compiled(model, loss=None)

    check_exact(build, numbers())


REGULARISERS = {
    "kernel": {"kernel_regularizer": "l2", "bias_regularizer": keras.regularizers.L1(0.1)},
    "l1 and l2": {"kernel_regularizer": keras.regularizers.L1L2(0.1, 0.2)},
    "activity": {"activity_regularizer": keras.regularizers.L2(0.1)},
    "all": {"kernel_regularizer": "l1", "activity_regularizer": "l1"},
}


@pytest.mark.parametrize("name", representative(REGULARISERS, "kernel", "all"))
def test_regularisers(name):
    check_exact(lambda: classifier(layers.Dense(4, **REGULARISERS[name])), numbers(), classes())


def test_regularised_embedding_and_mixing_loss():
    """Dense and sparse gradients of one variable meet, in the way that gathers predictions."""

    def build():
        model = keras.Sequential(
            [
                layers.Input((STEPS,), dtype="int32"),
                layers.Embedding(8, 4, embeddings_regularizer="l2", mask_zero=True),
                layers.GlobalAveragePooling1D(),
                layers.Dense(CLASSES, "softmax", kernel_regularizer="l2"),
            ]
        )
        return compiled(model, loss=keras.losses.Dice())

    check_exact(build, words(), np.eye(CLASSES)[classes()])


class OwnLoss(keras.Model):
    """compute_loss of its own: a term over pairs of samples, and one on weights."""

    def __init__(self):
        super().__init__()
        self.hidden = layers.Dense(5, "tanh", kernel_regularizer="l2")
        self.last = layers.Dense(2)

    def call(self, x):
        return self.last(self.hidden(x))

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        usual = super().compute_loss(x, y, y_pred, sample_weight, training)
        pairs = ops.mean(ops.square(y_pred[:, None] - y_pred[None]))
        return usual + 0.1 * pairs + 0.01 * ops.sum(ops.square(self.last.kernel)) + ops.mean(x * x)


def test_own_compute_loss():
    check_exact(lambda: compiled(OwnLoss(), "mse"), numbers(), numbers(width=2, seed=1), sample_weight=weights())


class OwnLossFromBatch(OwnLoss):
    """Needs no compiled loss at all."""

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return ops.mean(ops.square(y - y_pred) * ops.mean(x, axis=-1, keepdims=True))


def test_own_compute_loss_without_compiled_loss():
    check_exact(lambda: compiled(OwnLossFromBatch(), None), numbers(), numbers(width=2, seed=1))


class OwnReduction(keras.losses.Loss):
    """Comes from Keras, as one in its own tests does, and reduces in its own way all the same."""

    __module__ = "keras.src.testing"

    def __call__(self, y_true, y_pred, sample_weight=None):
        return ops.sum(ops.square(y_pred)) + ops.max(y_true)


def test_a_loss_of_kerass_that_reduces_by_itself():
    check_exact(lambda: regressor(loss=OwnReduction()), numbers(), numbers(width=2, seed=1))
