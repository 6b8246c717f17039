"""verify: says "exact" where it is, and names what breaks it where it is not."""

import keras
import numpy as np
import pytest
from here import BACKEND
from keras import layers, ops
from models import (
    BATCH,
    CLASSES,
    FEATURES,
    STEPS,
    WORDS,
    classes,
    classifier,
    compiled,
    made,
    numbers,
    regressor,
    snapshot,
    tagger,
    tags,
    weights,
    words,
)

import oomproof


def convolutional():
    inner = [
        layers.Reshape((FEATURES, 1)),
        layers.Conv1D(3, 2, activation="relu"),
        layers.LayerNormalization(),
        layers.Flatten(),
        layers.Dense(CLASSES, "softmax"),
    ]
    return compiled(keras.Sequential([layers.Input((FEATURES,)), *inner]))


def transformer():
    x = layers.Input((STEPS,), dtype="int32")
    h = layers.Embedding(WORDS, 4, mask_zero=True)(x)
    h = layers.LayerNormalization()(h + layers.MultiHeadAttention(2, 2, dropout=0.2)(h, h))
    return compiled(keras.Model(x, layers.Dense(CLASSES, "softmax")(h)), optimizer="adam")


def two_headed():
    x = layers.Input((FEATURES,))
    h = layers.Dense(4, "tanh", kernel_regularizer="l2")(x)
    model = keras.Model(x, {"a": layers.Dense(CLASSES, "softmax", name="a")(h), "b": layers.Dense(1, name="b")(h)})
    return compiled(model, {"a": "sparse_categorical_crossentropy", "b": "mse"}, loss_weights={"a": 1.0, "b": 0.2})


CLEAN = {
    "MLP with dropout": lambda: (lambda: classifier(layers.Dropout(0.5)), numbers(BATCH), classes(BATCH)),
    "CNN with LayerNorm": lambda: (convolutional, numbers(BATCH), classes(BATCH)),
    "masked LSTM": lambda: (
        lambda: tagger(layers.LSTM(3, return_sequences=True, dropout=0.2)),
        words(BATCH),
        tags(BATCH),
    ),
    "two outputs": lambda: (two_headed, numbers(BATCH), {"a": classes(BATCH), "b": numbers(BATCH, 1)}),
    "transformer": lambda: (transformer, words(BATCH), tags(BATCH)),
}


@pytest.mark.parametrize("case", CLEAN)
def test_clean_models_are_exact_and_nothing_changes(case):
    build, x, y = CLEAN[case]()
    model = made(build, mode="eager")
    model.train_on_batch(x, y)
    before = state(model)
    found = oomproof.verify(model, x, y, micro_batch_size=5)
    assert found
    assert found.exact or (BACKEND == "torch" and found.exactness.word == "exact but for random numbers")
    assert not found.culprits
    assert {d.variable for d in found.differences} == {v.path for v in model.trainable_variables}
    assert "exact" in str(found)
    after = state(model)
    assert list(before) == list(after)
    for name, value in before.items():
        np.testing.assert_array_equal(value, after[name], err_msg=name)


def state(model):
    """Everything verify must leave alone: weights, optimizer, metrics and seeds."""
    metrics = {f"metric {i}": np.array(ops.convert_to_numpy(v)) for i, v in enumerate(model.metrics_variables)}
    generators = [g for layer in model._flatten_layers() for g in getattr(layer, "_seed_generators", ())]
    seeds = {f"seed {i}": np.array(ops.convert_to_numpy(g.state.value)) for i, g in enumerate(generators)}
    return snapshot(model) | metrics | seeds


class CentresBatch(layers.Layer):
    """A home-made layer that takes a mean over the batch."""

    def call(self, x):
        return x - ops.mean(x, axis=0, keepdims=True)


def nested_norm():
    inner = keras.Sequential([layers.Dense(4), layers.BatchNormalization(name="deep_norm")], name="inner")
    return classifier(inner)


def test_names_a_nested_batch_normalisation():
    found = oomproof.verify(made(nested_norm), numbers(BATCH), classes(BATCH), micro_batch_size=4)
    assert not found.exact
    assert not found
    assert any("deep_norm" in culprit for culprit in found.culprits)
    assert "deep_norm" in str(found)


def test_names_a_layer_that_mixes_samples():
    model = made(lambda: classifier(CentresBatch(name="centres"), layers.Dense(4, name="innocent")))
    found = oomproof.verify(model, numbers(BATCH), classes(BATCH), micro_batch_size=4)
    assert not found.exact
    assert any("CentresBatch" in culprit and "centres" in culprit for culprit in found.culprits)
    assert not any("innocent" in culprit for culprit in found.culprits)


def test_dice_is_exact_and_noted():
    model = made(lambda: regressor(activation="sigmoid", loss=keras.losses.Dice()))
    found = oomproof.verify(model, numbers(BATCH), np.abs(numbers(BATCH, 2)), micro_batch_size=4)
    assert found.exact
    assert any("dice" in note for note in found.notes)


def test_names_an_added_loss_that_does_not_split():
    class Pairs(layers.Layer):
        def call(self, x):
            self.add_loss(ops.mean(ops.square(x[:, None] - x[None])))
            return x

    found = oomproof.verify(made(lambda: classifier(Pairs())), numbers(BATCH), classes(BATCH), micro_batch_size=4)
    assert not found.exact
    assert any("add_loss" in culprit for culprit in found.culprits)


class Sampling(layers.Layer):
    """Draws numbers in training and in inference, as a variational autoencoder does."""

    def __init__(self):
        super().__init__()
        self.seed_generator = keras.random.SeedGenerator(1)

    def call(self, x):
        return x + keras.random.normal(ops.shape(x), seed=self.seed_generator, dtype=x.dtype)


def test_random_numbers_are_not_blamed_for_mixing_samples():
    found = oomproof.verify(made(lambda: classifier(Sampling())), numbers(BATCH), classes(BATCH), micro_batch_size=4)
    assert found
    assert not found.culprits


@pytest.mark.usefixtures("float64")
def test_double_precision_is_held_to_it():
    found = oomproof.verify(made(classifier), numbers(BATCH), classes(BATCH), micro_batch_size=5)
    assert found.exact
    assert found.tolerance < 1e-8


def test_dropout_is_named_where_pieces_draw_other_numbers():
    model = made(lambda: classifier(layers.Dropout(0.5, name="drops")))
    found = oomproof.verify(model, numbers(BATCH), classes(BATCH), micro_batch_size=4)
    assert ("drops" in str(found)) == (BACKEND == "torch")


def test_sample_weights():
    model = made(
        lambda: classifier(loss=keras.losses.SparseCategoricalCrossentropy(reduction="mean_with_sample_weight"))
    )
    assert oomproof.verify(
        model, numbers(BATCH), classes(BATCH), micro_batch_size=5, sample_weight=weights(BATCH)
    ).exact


def test_exact_whatever_the_metrics_hold():
    """After an epoch the loss tracker holds a large sum, beside which one batch would vanish in single precision."""
    model = made(classifier)
    x, y = numbers(BATCH), classes(BATCH)
    model.train_on_batch(x, y)
    total, count = model._loss_tracker.variables
    total.assign(3e9)
    count.assign(1e9)
    found = oomproof.verify(model, x, y, micro_batch_size=5)
    assert found.exact
    assert np.isfinite(found.loss)


def test_mixed_precision():
    def build():
        inner = [layers.Dense(5, "tanh", dtype="mixed_float16"), layers.Dense(1, dtype="float32")]
        scaled = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(), initial_scale=8.0)
        return compiled(keras.Sequential([layers.Input((FEATURES,)), *inner]), "mse", scaled)

    assert oomproof.verify(made(build), numbers(BATCH), numbers(BATCH, 1), micro_batch_size=4).exact


def test_works_on_a_guarded_model():
    model = oomproof.guard(made(classifier), micro_batch_size=4)
    assert oomproof.verify(model, numbers(BATCH), classes(BATCH), micro_batch_size=4).exact
    model.fit(numbers(), classes(), batch_size=BATCH, verbose=0)


@pytest.mark.parametrize(
    ("size", "error"),
    [(0, ValueError), (-1, ValueError), (BATCH, ValueError), (2.5, TypeError), ("4", TypeError), (True, TypeError)],
)
def test_wrong_sizes(size, error):
    with pytest.raises(error, match="micro_batch_size"):
        oomproof.verify(made(classifier), numbers(BATCH), classes(BATCH), micro_batch_size=size)


def test_auto_is_no_size_to_compare():
    with pytest.raises((TypeError, ValueError), match="micro_batch_size"):
        oomproof.verify(made(classifier), numbers(BATCH), classes(BATCH), micro_batch_size="auto")


def test_uncompiled_model():
    model = keras.Sequential([layers.Input((FEATURES,)), layers.Dense(1)])
    with pytest.raises(ValueError, match="compile"):
        oomproof.verify(model, numbers(BATCH), numbers(BATCH, 1), micro_batch_size=4)


def test_not_a_model():
    with pytest.raises(TypeError, match=r"keras.Model"):
        oomproof.verify("model", numbers(BATCH), classes(BATCH), micro_batch_size=4)


def test_samples_that_do_not_match():
    with pytest.raises(ValueError, match="same"):
        oomproof.verify(made(classifier), numbers(BATCH), classes(5), micro_batch_size=4)
