"""A model that remembers the samples it was trained on, and what a stream should have given it."""

from __future__ import annotations

import keras
import numpy as np
from keras import ops

from oomproof.data.order import Shuffled


class Recorder(keras.Sequential):
    """Trains on batches whose first feature is the number of the sample."""

    def train_step(self, *arguments):
        x = arguments[-1][0]
        self.seen.append(np.asarray(ops.convert_to_numpy(x))[:, 0].astype(int).tolist())
        return super().train_step(*arguments)


def recorder(built=False, **options):
    model = Recorder(([keras.Input((3,))] if built else []) + [keras.layers.Dense(1)])
    model.seen = []
    model.compile(keras.optimizers.SGD(0.0), "mse", run_eagerly=True, **options)
    return model


def numbered(count):
    """Samples that can be told apart, with targets."""
    x = np.repeat(np.arange(count, dtype="float32")[:, None], 3, axis=1)
    return x, x[:, :1]


def expected(count, seed, epochs, batch_size):
    """The batches of these epochs, as lists of sample numbers."""
    order = Shuffled(count, seed)
    return [
        order.samples(epoch, start, start + batch_size).tolist()
        for epoch in epochs
        for start in range(0, count, batch_size)
    ]
