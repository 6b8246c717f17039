"""Models whose head runs in parts, and data for them."""

import keras
import numpy as np
from keras import layers, ops
from recompute_models import CLASSES, IMAGES, NUMBERS, SAMPLES, TAGS, WORDS, compiled, residual, transformer

RANDOM = np.random.default_rng(1)
MORE_TAGS = RANDOM.integers(0, 7, (SAMPLES, 5))
WEIGHTS = RANDOM.random((SAMPLES, 5))


def tied():
    """The table that looks words up also makes the logits."""
    inputs = keras.Input((5,), dtype="int32")
    words = layers.ReversibleEmbedding(7, 4, mask_zero=True, name="words")
    x = layers.Dense(4, "gelu", name="wide")(words(inputs))
    x = layers.LayerNormalization(name="last")(x)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return compiled(keras.Model(inputs, words(x, reverse=True)), loss)


def several():
    """Outputs from the head, from before it, and from both; with weights, and a penalty of the head's."""
    inputs = keras.Input((5,), dtype="int32")
    x = layers.Embedding(7, 4, name="words")(inputs)
    x = layers.Dense(4, "tanh", activity_regularizer="l2", name="wide")(x)
    early = layers.Dense(3, "softmax", name="early")(x)
    late = layers.Dense(7, kernel_regularizer="l2", name="late")(x)
    mixed = layers.Dense(2, name="mixed")(layers.Concatenate(name="both")([late, early]))
    model = keras.Model(inputs, {"late": late, "early": early, "mixed": mixed})
    losses = {
        "early": "sparse_categorical_crossentropy",
        "late": keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        "mixed": keras.losses.MeanSquaredError("mean_with_sample_weight"),
    }
    return compiled(
        model,
        losses,
        loss_weights={"early": 0.5, "late": 1.0, "mixed": 2.0},
        metrics={"early": "accuracy", "late": keras.metrics.SparseCategoricalCrossentropy(from_logits=True)},
        weighted_metrics={"mixed": "mae"},
    )


SEVERAL = {"early": TAGS, "late": MORE_TAGS, "mixed": RANDOM.normal(size=(SAMPLES, 5, 2))}


class Scaled(layers.Layer):
    """A layer of a user's own, with a weight that Keras does not list among those of the head's calls."""

    def __init__(self, other, **options):
        super().__init__(**options)
        self._hidden = (lambda: other.kernel,)

    def call(self, x):
        return x * ops.mean(self._hidden[0]())


def masked():
    """Two outputs whose losses divide by what a mask leaves."""
    inputs = keras.Input((5,), dtype="int32")
    x = layers.Embedding(7, 4, mask_zero=True, name="words")(inputs)
    x = layers.Dense(4, "tanh", name="wide")(x)
    outputs = [layers.Dense(3, "softmax", name="one")(x), layers.Dense(3, "softmax", name="two")(x)]
    return compiled(keras.Model(inputs, outputs), ["sparse_categorical_crossentropy"] * 2)


def hidden():
    inputs = keras.Input((4,))
    first = layers.Dense(4, "tanh", name="first")
    x = first(inputs)
    x = Scaled(first, name="scaled")(x)
    return compiled(keras.Model(inputs, layers.Dense(3, "softmax", name="last")(x)))


def frozen():
    """A body that does not train."""
    model = several()
    for name in ("words", "wide"):
        model.get_layer(name).trainable = False
    model.compile(keras.optimizers.SGD(0.05), model.loss)
    return model


# name: (build, data, first call of the head)
HEADS = {
    "residual": (residual, (IMAGES, CLASSES), "head"),
    "pooled": (residual, (IMAGES, CLASSES), "pool"),
    "transformer": (transformer, (WORDS, TAGS), "attended_1"),
    "weighted": (transformer, (WORDS, TAGS, WEIGHTS), "tags"),
    "tied": (tied, (WORDS, MORE_TAGS), "last"),
    "several": (several, (WORDS, SEVERAL), "late"),
    "masked": (masked, (WORDS, [TAGS, TAGS]), "one"),
    "hidden": (hidden, (NUMBERS, CLASSES), "scaled"),
    "frozen": (frozen, (WORDS, SEVERAL), "late"),
}
