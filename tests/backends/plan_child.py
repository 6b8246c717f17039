"""Training within a real limit, with the plan made before the first step. Prints one JSON line.

    python plan_child.py MODEL LIMIT_MB OUT.npz

A limit of 0 trains plain Keras and says what it took.
"""

from __future__ import annotations

import json
import logging
import sys

import keras
import numpy as np

import oomproof
from oomproof import _backends as backends

BATCH, STEPS = 128, 3
MIB = 2**20


def dense(norm, dropout):
    """Blocks that keep much more than their weights: no convolutions, whose scratch on a CPU hides everything else."""
    inputs = x = keras.Input((32, 16))
    for _ in range(10):
        y = keras.layers.Dense(48, activation="gelu")(norm()(x))
        x = keras.layers.Add()([keras.layers.Dense(16)(keras.layers.Dropout(dropout, seed=3)(y)), x])
    return keras.Model(inputs, keras.layers.Dense(10)(keras.layers.GlobalAveragePooling1D()(x)))


MODELS = {
    # Pieces draw other masks than a whole batch.
    "layer norm": lambda: dense(keras.layers.LayerNormalization, 0.0),
    "batch norm": lambda: dense(keras.layers.BatchNormalization, 0.1),
}


def main(name, limit, path):
    keras.utils.set_random_seed(0)
    model = MODELS[name]()
    model.compile(
        keras.optimizers.SGD(0.01, momentum=0.9), keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    )
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(BATCH * STEPS, 32, 16)).astype("float32"), rng.integers(0, 10, (BATCH * STEPS, 1))

    class Batches(keras.utils.PyDataset):
        def __len__(self):
            return STEPS

        def __getitem__(self, index):
            part = slice(index * BATCH, (index + 1) * BATCH)
            return x[part], y[part]

    lines = []

    class Keep(logging.Handler):
        def emit(self, record):
            lines.append(record.getMessage())

    logging.getLogger("oomproof").addHandler(Keep())
    memory = backends.current().memory()
    memory.reset_peak()
    history = (oomproof.fit if limit else keras.Model.fit)(model, Batches(), epochs=2, shuffle=False, verbose=2)
    np.savez(path, *model.get_weights())
    run = history.run.to_dict() if limit else None
    ooms = history.run.ooms if limit else None
    print(json.dumps({"peak": memory.usage().peak, "run": run, "ooms": ooms, "lines": lines}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
