"""Whatever is combined at random, model, loss, weights, optimizer and sizes, training in pieces is training."""

import keras
import numpy as np
import pytest
from here import modes
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from keras import layers, ops, optimizers
from models import CLASSES, STEPS, WORDS, check_exact, compiled, tags, weights, words

pytestmark = pytest.mark.usefixtures("float64")

REDUCTIONS = ["sum", "sum_over_batch_size", "mean", "mean_with_sample_weight", None]
OPTIMIZERS = {
    "sgd": lambda **options: optimizers.SGD(0.05, momentum=0.9, **options),
    "adam": lambda **options: optimizers.Adam(0.02, **options),
    "rmsprop": lambda **options: optimizers.RMSprop(0.02, **options),
}
OPTIONS = [
    {},
    {"clipnorm": 0.1},
    {"global_clipnorm": 0.1, "weight_decay": 0.01},
    {"use_ema": True, "ema_overwrite_frequency": 2},
    {"gradient_accumulation_steps": 2},
]


class Penalty(layers.Layer):
    """Adds a loss that is a mean or a sum over samples."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.supports_masking = True

    def call(self, x):
        if self.kind:
            self.add_loss(0.1 * getattr(ops, self.kind)(ops.square(x)))
        return x


def distance(y_true, y_pred):
    """A loss of one's own: Keras reduces it, oomproof cannot know it."""
    return ops.sum(ops.abs(ops.one_hot(ops.cast(y_true, "int32"), CLASSES) - y_pred), axis=-1)


@st.composite
def cases(draw):
    samples = draw(st.integers(5, 20))
    batch = draw(st.integers(4, 12))
    weighting = draw(st.sampled_from(["none", "sample", "class"]))
    return {
        "samples": samples,
        "batch": batch,
        # One that cuts every batch but, at times, the last.
        "micro": draw(st.integers(1, min(batch, samples) - 1)),
        "reduction": draw(st.sampled_from(REDUCTIONS)),
        "masked": draw(st.booleans()),
        "ignored": draw(st.sampled_from([None, 0])),
        "own": draw(st.booleans()),
        "weighting": weighting,
        "regularizer": draw(st.sampled_from([None, "l1", "l2"])),
        "penalty": draw(st.sampled_from([None, "mean", "sum"])),
        "optimizer": draw(st.sampled_from(sorted(OPTIMIZERS))),
        "options": draw(st.sampled_from(OPTIONS)),
        "mode": draw(st.sampled_from(modes("eager", "graph"))),
        "seed": draw(st.integers(0, 99)),
    }


def build(case):
    x = layers.Input((STEPS,), dtype="int32")
    h = layers.Embedding(WORDS, 4, mask_zero=case["masked"], embeddings_regularizer=case["regularizer"])(x)
    h = Penalty(case["penalty"])(layers.Dense(4, "tanh", kernel_regularizer=case["regularizer"])(h))
    model = keras.Model(x, layers.Dense(CLASSES, "softmax")(h))
    if case["own"]:
        loss = distance
    else:
        loss = keras.losses.SparseCategoricalCrossentropy(reduction=case["reduction"], ignore_class=case["ignored"])
    return compiled(model, loss, OPTIMIZERS[case["optimizer"]](**case["options"]), weighted_metrics=["accuracy"])


def drawn(examples):
    """Each example is a compile or two."""
    return settings(
        max_examples=examples,
        derandomize=True,
        deadline=None,
        database=None,
        # A fixture that only sets the precision may stay as it is from one example to the next.
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    )


@drawn(4)
@given(cases())
def test_any_combination_is_exact(case):
    check(case)


@pytest.mark.exhaustive
@drawn(20)
@given(cases())
def test_many_combinations_are_exact(case):
    check(case)


def check(case):
    samples, seed = case["samples"], case["seed"]
    fit = {"batch_size": case["batch"]}
    if case["weighting"] == "sample":
        fit["sample_weight"] = np.where(words(samples, seed) == 1, 0.0, weights(samples, STEPS, seed=seed))
    # Class weights go with one target for each sample only; here a weight for each sample stands for them.
    elif case["weighting"] == "class":
        fit["sample_weight"] = np.repeat(np.array([0.1, 1.0, 3.0])[np.arange(samples) % 3][:, None], STEPS, axis=1)
    check_exact(
        lambda: build(case),
        words(samples, seed),
        tags(samples, seed),
        micro=case["micro"],
        mode=case["mode"],
        tolerance=1e-7,
        **fit,
    )
