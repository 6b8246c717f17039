"""Small models to estimate."""

import keras
import numpy as np
from keras import layers

MIB = 2**20
FIELDS = ("engine", "low", "expected", "high", "limit", "fits", "driver", "by_category", "by_layer", "seconds")


def conv_net(optimizer="adam", **options):
    keras.utils.clear_session(free_memory=False)
    model = keras.Sequential(
        [
            keras.Input((32, 32, 3)),
            layers.Conv2D(16, 3, padding="same", activation="relu", name="first"),
            layers.Conv2D(32, 3, padding="same", activation="relu", name="second"),
            layers.GlobalAveragePooling2D(name="pool"),
            layers.Dense(10, name="head"),
        ],
        name="conv_net",
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, metrics=["accuracy"], **options)
    return model


def wide_net(optimizer):
    """Weights are most of what it takes."""
    keras.utils.clear_session(free_memory=False)
    model = keras.Sequential([keras.Input((512,)), layers.Dense(1024, name="wide"), layers.Dense(1, name="out")])
    model.compile(optimizer, "mse")
    return model


def weights_of(model):
    return sum(int(np.prod(weight.shape)) * 4 for weight in model.trainable_weights)
