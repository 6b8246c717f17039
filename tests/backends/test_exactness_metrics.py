"""Metrics: History shows what plain training would have shown."""

import keras
import numpy as np
import pytest
from here import only
from keras import layers, metrics, ops
from models import (
    CLASSES,
    SAMPLES,
    STEPS,
    check_exact,
    classes,
    classifier,
    compiled,
    numbers,
    regressor,
    tagger,
    tags,
    weights,
    words,
)

pytestmark = pytest.mark.usefixtures("float64")


def one_hot():
    return np.eye(CLASSES)[classes()]


class LargestSum(metrics.Metric):
    """A metric that needs all of a batch at once."""

    def __init__(self, name="largest_sum"):
        super().__init__(name=name)
        self.largest = self.add_variable((), initializer="zeros")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.largest.assign(ops.maximum(self.largest, ops.sum(ops.cast(y_pred, self.largest.dtype))))

    def result(self):
        return ops.convert_to_tensor(self.largest)


class LargestVariable(LargestSum):
    def result(self):
        return self.largest


def batch_range(y_true, y_pred):
    return ops.max(y_pred) - ops.min(y_pred)


def sets():
    return {
        "counts": ["accuracy", metrics.Precision(), metrics.Recall(), "mae"],
        "curves": [
            metrics.AUC(num_thresholds=20),
            metrics.AUC(curve="PR", multi_label=True, num_labels=CLASSES, name="pr"),
        ],
        "averages": [metrics.F1Score(), metrics.MeanIoU(2), metrics.R2Score(), metrics.RootMeanSquaredError()],
        "scalar function": [batch_range, "accuracy"],
        "own class": [LargestSum()],
        "own class, its variable": [LargestVariable()],
        "mixing functions of Keras": [keras.losses.dice, keras.losses.Tversky(name="tv")],
        "correlation over samples": [metrics.PearsonCorrelation(axis=0), metrics.ConcordanceCorrelation(axis=0)],
    }


MARKS = {"own class, its variable": [only("tensorflow", "torch", because="a metric whose result is its variable")]}


@pytest.mark.parametrize(
    ("kind", "argument"),
    [
        *(pytest.param(kind, "metrics", marks=MARKS.get(kind, [])) for kind in sets()),
        *((kind, "weighted_metrics") for kind in ("counts", "curves", "own class")),
    ],
)
def test_metrics(kind, argument):
    check_exact(
        lambda: classifier(loss="categorical_crossentropy", **{argument: sets()[kind]}),
        numbers(),
        one_hot(),
        sample_weight=weights(),
        # Keras computes parts of these in single precision.
        tolerance=1e-7 if kind == "curves" else 1e-9,
    )


def first_class_error(y_true, y_pred):
    return ops.abs(ops.cast(y_true, y_pred.dtype) - y_pred[..., 0])


@pytest.mark.parametrize("own", [[], [first_class_error]], ids=["streamed", "gathered"])
def test_metrics_of_masked_sequences(own):
    check_exact(
        lambda: tagger(weighted_metrics=["accuracy", *own], metrics=["sparse_categorical_crossentropy"]),
        words(),
        tags(),
        sample_weight=weights(SAMPLES, STEPS),
    )


def test_metrics_beside_a_mixing_loss():
    check_exact(
        lambda: classifier(loss=keras.losses.Dice(), metrics=["accuracy", metrics.AUC(num_thresholds=20)]),
        numbers(),
        one_hot(),
    )


class OwnMetrics(keras.Model):
    """compute_metrics of its own, and a metric that the model updates itself."""

    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(2)
        self.largest = metrics.Mean(name="largest")

    def call(self, x):
        return self.dense(x)

    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        self.largest.update_state(ops.max(y_pred))
        return {**super().compute_metrics(x, y, y_pred, sample_weight), "constant": 3.0}


@pytest.mark.parametrize(
    "loss", ["mse", lambda y_true, y_pred: ops.mean(ops.square(y_true - y_pred))], ids=["mse", "scalar"]
)
def test_own_compute_metrics(loss):
    check_exact(lambda: compiled(OwnMetrics(), loss, metrics=["mae"]), numbers(), numbers(width=2, seed=1), epochs=2)


def test_validation_is_in_history():
    check_exact(
        lambda: regressor(metrics=["mae", batch_range]),
        numbers(),
        numbers(width=2, seed=1),
        validation_split=0.3,
        epochs=2,
    )
