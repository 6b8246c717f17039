"""Estimates by real steps at small sizes, beside the peak of the step itself. Prints one JSON line."""

from __future__ import annotations

import json

import keras
import numpy as np
import tensorflow as tf

import oomproof
from oomproof import _backends as backends

BATCH = 256


def main():
    # Threads run the ops of a graph in different orders, and equal steps then peak differently.
    tf.config.threading.set_inter_op_parallelism_threads(1)
    keras.utils.set_random_seed(0)
    inputs = x = keras.Input((64, 8))
    for _ in range(4):
        x = keras.layers.LayerNormalization()(keras.layers.Dense(64, activation="relu")(x))
    x = keras.layers.Flatten()(x)
    # Several outputs: their structure is a list, which not every kind of dataset takes.
    model = keras.Model(inputs, [keras.layers.Dense(10)(x), keras.layers.Dense(1)(x)])
    model.compile("adam", [keras.losses.SparseCategoricalCrossentropy(from_logits=True), "mse"])
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(BATCH, 64, 8)).astype("float32"), (rng.integers(0, 10, (BATCH, 1)), np.zeros((BATCH, 1)))
    model.fit(x[:8], [part[:8] for part in y], verbose=0)
    variables = [*model.variables, *model.optimizer.variables]
    before = [np.array(keras.ops.convert_to_numpy(variable)) for variable in variables]
    found = oomproof.estimate(model, BATCH, engine="probe")
    after = [np.array(keras.ops.convert_to_numpy(variable)) for variable in variables]
    same = all(np.array_equal(a, b) for a, b in zip(before, after, strict=True))
    print(json.dumps({"same": same, "estimate": found.to_dict(), "peak": peak(model, x, y)}))


def peak(model, x, y):
    """What a later step of `fit` takes, or `None` where it does not fit."""
    memory = backends.current().memory()
    forget = keras.callbacks.LambdaCallback(on_train_batch_end=lambda step, logs: step or memory.reset_peak())
    try:
        model.fit(Twice(x, y), verbose=0, callbacks=[forget])
    except tf.errors.ResourceExhaustedError:
        return None
    return memory.usage().peak


class Twice(keras.utils.PyDataset):
    def __init__(self, x, y):
        super().__init__()
        self._batch = x, y

    def __len__(self):
        return 2

    def __getitem__(self, index):
        return self._batch


if __name__ == "__main__":
    main()
