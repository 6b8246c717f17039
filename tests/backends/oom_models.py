"""What the child processes train: small models, data that counts what is pulled, callbacks that record."""

from __future__ import annotations

import keras
import numpy as np
import psutil

BATCH, STEPS = 128, 4


class Seen(keras.metrics.Metric):
    """Counts how often each sample took part in an epoch. Labels are the numbers of the samples."""

    def __init__(self, samples):
        super().__init__(name="seen")
        self.counts = self.add_weight(shape=(samples,), initializer="zeros", name="counts")

    def update_state(self, y_true, y_pred, sample_weight=None):
        ids = keras.ops.cast(keras.ops.reshape(y_true, (-1,)), "int32")
        self.counts.assign(self.counts + keras.ops.sum(keras.ops.one_hot(ids, self.counts.shape[0]), axis=0))

    def result(self):
        return keras.ops.max(self.counts)


class Counting(keras.utils.PyDataset):
    """NumPy batches, outside of the limited allocator, that remembers what was pulled and in which order."""

    def __init__(self, arrays, batch=BATCH):
        super().__init__()
        self.arrays, self.batch, self.pulls = arrays, batch, []

    def __len__(self):
        return len(self.arrays[0]) // self.batch

    def __getitem__(self, index):
        self.pulls.append(int(index))
        return tuple(array[index * self.batch : (index + 1) * self.batch] for array in self.arrays)


class Recorder(keras.callbacks.Callback):
    """Memory and optimizer steps after every batch, sample counts and the size of the process after every epoch."""

    def __init__(self, memory):
        super().__init__()
        self.memory = memory
        self.current, self.peaks, self.iterations, self.seen, self.resident = [], [], [], [], []

    def on_train_batch_begin(self, batch, logs=None):
        self.memory.reset_peak()

    def on_train_batch_end(self, batch, logs=None):
        self.current.append(self.memory.current())
        self.peaks.append(self.memory.peak())
        self.iterations.append(number(self.model.optimizer.iterations))

    def on_epoch_end(self, epoch, logs=None):
        counts = keras.ops.convert_to_numpy(self.model.seen.counts)
        self.seen.append([float(np.min(counts)), float(np.max(counts))])
        self.resident.append(psutil.Process().memory_info().rss)


class Ballast(keras.callbacks.Callback):
    """Takes memory away at one batch and gives it back at the begin of a later epoch."""

    def __init__(self, memory, mib, take, give):
        super().__init__()
        self.memory, self.mib, self.take, self.give = memory, mib, take, give
        self.epoch, self.held = 0, None

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch
        if epoch == self.give:
            self.held = None

    def on_train_batch_begin(self, batch, logs=None):
        if (self.epoch, batch) == self.take:
            self.held = self.memory.ballast(self.mib)


def sequences(samples=BATCH * STEPS):
    rng = np.random.default_rng(0)
    return rng.normal(size=(samples, 64, 4)).astype("float32"), np.arange(samples)[:, None]


def token_net(samples=BATCH * STEPS, norm=keras.layers.LayerNormalization, count=True):
    """No convolutions: on the CPU their backward pass takes tens of MB of scratch whatever the batch.

    And nothing with a kink, which turns a difference in the last digit into one of a whole sample's share; but on
    TensorFlow, which fuses a relu into the matrix product, the limits of the scenarios leave no room for more.
    """
    keras.utils.set_random_seed(1)
    activation = "relu" if keras.backend.backend() == "tensorflow" else "tanh"
    stack = [keras.Input((64, 4))]
    for _ in range(3):
        stack += [keras.layers.Dense(64, activation=activation), norm()]
    model = keras.Sequential([*stack, keras.layers.GlobalAveragePooling1D(), keras.layers.Dense(samples)])
    seen = Seen(samples)
    # Plain momentum: Adam divides by the size of a gradient, which blows rounding up where gradients are tiny.
    model.compile(
        keras.optimizers.SGD(0.05, momentum=0.9),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=[seen] if count else ["accuracy"],
    )
    object.__setattr__(model, "seen", seen)
    return model


def table_net():
    """A table so large that its update does not fit beside it."""
    keras.utils.set_random_seed(1)
    rows, width = 60_000, 32
    model = keras.Sequential(
        [
            keras.Input((4,), dtype="int32"),
            keras.layers.Embedding(rows, width),
            keras.layers.Flatten(),
            keras.layers.Dense(1),
        ]
    )
    model.compile(keras.optimizers.Adam(1e-3), "mse")
    rng = np.random.default_rng(0)
    return model, (rng.integers(0, rows, (256, 4)).astype("int32"), rng.normal(size=(256, 1)).astype("float32"))


def wide_net():
    """A layer so wide that each sample takes megabytes."""
    keras.utils.set_random_seed(1)
    wide = keras.layers.Dense(4096, activation="relu")
    model = keras.Sequential([keras.Input((64, 4)), wide, keras.layers.GlobalAveragePooling1D(), keras.layers.Dense(1)])
    model.compile("adam", "mse")
    return model


def warm_up():
    """Whatever a framework makes once: threads, pools, kernels."""
    model, (x, y) = token_net(), sequences()
    model.fit(x, y, batch_size=len(x), verbose=0)
    model.predict(x, batch_size=len(x), verbose=0)


def number(variable):
    return int(keras.ops.convert_to_numpy(variable))


def state_of(model):
    """Every variable there is, as bytes on the host."""
    variables = [*model.variables, *model.optimizer.variables]
    return {f"{i} {v.path}": np.array(keras.ops.convert_to_numpy(v)) for i, v in enumerate(variables)}


def changed(before, after):
    return [name for name in before if before[name].tobytes() != after[name].tobytes()]


def lost(model):
    """Variables whose value never came to be. JAX ends the process when such a value is read, so it is only awaited."""
    found = []
    for index, variable in enumerate([*model.variables, *model.optimizer.variables]):
        try:
            getattr(variable.value, "block_until_ready", lambda: None)()
        except Exception:
            found.append(f"{index} {variable.path}")
    return found
