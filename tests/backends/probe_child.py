"""Estimates by real steps at small sizes, beside the peak of the step itself. Prints one JSON line."""

from __future__ import annotations

import json

import keras
import numpy as np
import tensorflow as tf

import oomproof
from oomproof import backends

BATCH = 256


def main():
    # Threads run the ops of a graph in different orders, and equal steps then peak differently.
    tf.config.threading.set_inter_op_parallelism_threads(1)
    keras.utils.set_random_seed(0)
    stack = [keras.Input((64, 8))]
    for _ in range(4):
        stack += [keras.layers.Dense(64, activation="relu"), keras.layers.LayerNormalization()]
    model = keras.Sequential([*stack, keras.layers.Flatten(), keras.layers.Dense(10)])
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(BATCH, 64, 8)).astype("float32"), rng.integers(0, 10, (BATCH, 1))
    model.fit(x[:8], y[:8], verbose=0)
    variables = [*model.variables, *model.optimizer.variables]
    before = [np.array(keras.ops.convert_to_numpy(variable)) for variable in variables]
    found = oomproof.estimate(model, BATCH, engine="probe")
    after = [np.array(keras.ops.convert_to_numpy(variable)) for variable in variables]
    memory = backends.current().memory()
    memory.reset_peak()
    model.train_on_batch(x, y)
    same = all(np.array_equal(a, b) for a, b in zip(before, after, strict=True))
    print(json.dumps({"same": same, "estimate": found.to_json(), "peak": memory.usage().peak}))


if __name__ == "__main__":
    main()
