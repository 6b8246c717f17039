"""A small model to make plans for, with data."""

import keras
import numpy as np

import oomproof


def a_model(norm=keras.layers.LayerNormalization, blocks=6, compiled=True):
    keras.utils.clear_session()  # Names count from the beginning, as in another run of a script.
    keras.utils.set_random_seed(0)
    inputs = x = keras.Input((16, 32))
    for index in range(blocks):
        y = keras.layers.Dense(128, activation="relu", name=f"wide_{index}")(norm(name=f"norm_{index}")(x))
        x = keras.layers.Add(name=f"add_{index}")([keras.layers.Dense(32, name=f"narrow_{index}")(y), x])
    model = keras.Model(inputs, keras.layers.Dense(3)(keras.layers.GlobalAveragePooling1D()(x)))
    if compiled:
        model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def data(samples=64):
    rng = np.random.default_rng(0)
    return rng.normal(size=(samples, 16, 32)).astype("float32"), rng.integers(0, 3, (samples, 1))


def peak(batch=1024):
    return oomproof.estimate(a_model(), batch, memory="80GiB", engine="trace").expected
