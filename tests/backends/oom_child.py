# ruff: noqa: E402
"""One scenario on TensorFlow's real allocator, in a process of its own: the limit is read once, at import.

    python oom_child.py SCENARIO LIMIT_MB OUT.npz [JSON OPTIONS]

Prints one JSON line and writes the final weights to OUT.npz. A limit of 0 means none: the reference runs.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time

LIMIT = int(sys.argv[2]) if __name__ == "__main__" else 0
# oneDNN allocates past the limited allocator and crashes the process when it cannot.
os.environ.update(KERAS_BACKEND="tensorflow", TF_ENABLE_ONEDNN_OPTS="0", TF_CPP_MIN_LOG_LEVEL="3")
if LIMIT:
    os.environ.update(TF_CPU_ALLOCATOR_USE_BFC="true", TF_CPU_BFC_MEM_LIMIT_IN_MB=str(LIMIT))

import keras
import numpy as np
import tensorflow as tf

import oomproof
from oomproof.records import Run

BATCH, STEPS = 128, 4
MIB = 2**20
LINES: list[str] = []  # What oomproof logged.
OPTIONS = json.loads(sys.argv[4]) if len(sys.argv) > 4 else {}


def memory() -> dict[str, int]:
    return dict(tf.config.experimental.get_memory_info("CPU:0")) if LIMIT else {"current": 0, "peak": 0}


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
    """Memory and optimizer steps after every batch, sample counts after every epoch."""

    def __init__(self):
        super().__init__()
        self.current, self.peaks, self.iterations, self.seen = [], [], [], []

    def on_train_batch_begin(self, batch, logs=None):
        if LIMIT:
            tf.config.experimental.reset_memory_stats("CPU:0")

    def on_train_batch_end(self, batch, logs=None):
        use = memory()
        self.current.append(use["current"])
        self.peaks.append(use["peak"])
        self.iterations.append(int(self.model.optimizer.iterations))

    def on_epoch_end(self, epoch, logs=None):
        counts = self.model.seen.counts
        self.seen.append([float(np.min(counts)), float(np.max(counts))])


def ballast(mib):
    """Memory that is taken, in small tensors: one large one might itself not find a gap."""
    return [tf.zeros((MIB // 8,)) for _ in range(2 * mib)]


class Ballast(keras.callbacks.Callback):
    """Takes memory away at one batch and gives it back at the begin of a later epoch."""

    def __init__(self, mib, take, give):
        super().__init__()
        self.mib, self.take, self.give = mib, take, give
        self.epoch, self.held = 0, None

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch
        if epoch == self.give:
            self.held = None

    def on_train_batch_begin(self, batch, logs=None):
        if (self.epoch, batch) == self.take:
            self.held = ballast(self.mib)


def sequences(samples=BATCH * STEPS):
    rng = np.random.default_rng(0)
    return rng.normal(size=(samples, 64, 4)).astype("float32"), np.arange(samples)[:, None]


def token_net(samples=BATCH * STEPS, norm=keras.layers.LayerNormalization, count=True):
    """No convolutions: on the CPU their backward pass takes tens of MB of scratch whatever the batch."""
    keras.utils.set_random_seed(1)
    stack = [keras.Input((64, 4))]
    for _ in range(3):
        stack += [keras.layers.Dense(64, activation="relu"), norm()]
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


def state_of(model):
    """Every variable there is, as bytes on the host."""
    variables = [*model.variables, *model.optimizer.variables]
    return {f"{i} {v.path}": v.numpy().copy() for i, v in enumerate(variables)}


def changed(before, after):
    return [name for name in before if before[name].tobytes() != after[name].tobytes()]


def unseen_ballast(model, mib_at):
    """Memory that disappears after oomproof has looked and before the step runs: no prediction helps."""
    guard = vars(model)["_oomproof_guard"]
    step = guard._ready().step
    original, held = step.train, {}

    def train(*args):
        calls = held["calls"] = held.get("calls", -1) + 1
        if calls in mib_at:
            held["ballast"] = ballast(mib_at[calls])
        return original(*args)

    step.train = train
    return held


def report(model, path, history=None, **extra):
    np.savez(path, *model.get_weights())
    run = getattr(history, "run", None)
    answer = {"run": None if run is None else run.to_json(), "ooms": None if run is None else run.ooms}
    if history is not None:
        answer["losses"] = history.history.get("loss")
        answer["val_losses"] = history.history.get("val_loss")
    print(json.dumps({**answer, "lines": LINES, **extra}))


def trained(path, callbacks=(), epochs=2, prepare=None, **guarded):
    """fit under guard, with everything recorded that every scenario promises."""
    model, data, recorder = token_net(), Counting(sequences()), Recorder()
    if LIMIT:
        oomproof.guard(model, **guarded)
        if prepare:
            prepare(model)
    baseline = memory()["current"]
    history = model.fit(data, epochs=epochs, verbose=2, shuffle=False, callbacks=[*callbacks, recorder])
    facts = {name: getattr(recorder, name) for name in ("current", "peaks", "iterations", "seen")}
    report(model, path, history, pulls=data.pulls, baseline=baseline, **facts)


# The scenarios


def reference(path):
    trained(path, epochs=OPTIONS.get("epochs", 2))


def first_step(path):
    trained(path)


def ballast_seen(path):
    trained(path, [Ballast(OPTIONS["ballast"], (0, 2), 2)], epochs=4)


def ballast_unseen(path):
    trained(path, epochs=4, prepare=lambda model: unseen_ballast(model, {2: OPTIONS["ballast"], 9: 0}))


def repeatedly(path):
    """Every epoch memory comes back and is taken away again, by another amount."""
    rng = np.random.default_rng(OPTIONS.get("seed", 0))
    low, high = OPTIONS["between"]
    model, data, epochs, recorder = token_net(), Counting(sequences()), OPTIONS["epochs"], Recorder()
    oomproof.guard(model)
    guard = vars(model)["_oomproof_guard"]
    step = guard._ready().step
    original, held = step.train, []

    def train(*args):
        if not held:
            held.extend(ballast(int(rng.integers(low, high))))
        return original(*args)

    class GiveBack(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            held.clear()

    step.train = train
    history = model.fit(data, epochs=epochs, verbose=0, shuffle=False, callbacks=[GiveBack(), recorder])
    report(model, path, history, pulls=data.pulls, seen=recorder.seen, iterations=recorder.iterations)


def validation(path):
    """Training batches of 16 fit; a validation batch of all samples does not."""
    model, (x, y) = token_net(), sequences()
    data, held_out = Counting((x, y), 16), Counting((x, y), len(x))
    if LIMIT:
        oomproof.guard(model)
    history = model.fit(data, epochs=1, verbose=2, shuffle=False, validation_data=held_out)
    report(model, path, history, val_pulls=held_out.pulls, iterations=int(model.optimizer.iterations))


def predict(path):
    model, (x, _) = token_net(), sequences()
    if LIMIT:
        oomproof.guard(model)
    outputs = model.predict(Counting((x,), len(x)), verbose=2)
    np.savez(path, outputs)
    print(json.dumps({"lines": LINES, "shape": outputs.shape}))


def commit(path):
    model, (x, y) = table_net()
    if LIMIT:
        oomproof.guard(model)
    data = Counting((x, y), 64)
    before, error, history = None, None, None

    class Before(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            nonlocal before
            before = state_of(self.model)

    try:
        history = model.fit(data, epochs=2, verbose=2, shuffle=False, callbacks=[Before()])
    except oomproof.RecoveryFailedError as caught:
        error = caught
    run = error.run if error else getattr(history, "run", None)
    kinds = [[e.kind, e.before, e.after] for e in run.events] if run else []
    extra = {"error": str(error)} if error else {}
    report(
        model, path, history, kinds=kinds, changed=changed(before, state_of(model)) if error else [],
        iterations=int(model.optimizer.iterations), lean=bool(run and run.plan.lean_commit), pulls=data.pulls, **extra,
    )  # fmt: skip


def hopeless(path):
    """From the second epoch on, not even one sample fits: a layer so wide that each takes megabytes."""
    keras.utils.set_random_seed(1)
    wide = keras.layers.Dense(4096, activation="relu")
    model = keras.Sequential([keras.Input((64, 4)), wide, keras.layers.GlobalAveragePooling1D(), keras.layers.Dense(1)])
    model.compile("adam", "mse")
    data = Counting(sequences(16), 8)
    oomproof.guard(model)
    vault = {}

    class Squeeze(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 1:
                vault["state"] = state_of(self.model)
                vault["ballast"] = ballast((LIMIT * MIB - memory()["current"]) // MIB - 1)

    try:
        model.fit(data, epochs=3, verbose=2, shuffle=False, callbacks=[Squeeze()])
    except oomproof.RecoveryFailedError as error:
        moved = changed(vault["state"], state_of(model))
        model.save(path.replace(".npz", ".keras"))
        again = keras.models.load_model(path.replace(".npz", ".keras"), compile=False)
        same = all(np.array_equal(a, b) for a, b in zip(again.get_weights(), model.get_weights(), strict=True))
        report(
            model, path, None, message=str(error), cause=type(error.__cause__).__name__, moved=moved, saved=same,
            run_is_there=isinstance(error.run, Run), epochs=error.history.epoch, run_steps=error.run.steps,
            kinds=[[e.kind, e.before, e.after] for e in error.run.events], iterations=int(model.optimizer.iterations),
        )  # fmt: skip


def transactional(path):
    """An un-split step that fails changes nothing under guard; plain Keras leaves a half-made step behind."""
    model, (x, y) = token_net(norm=keras.layers.BatchNormalization, count=False), sequences()
    oomproof.guard(model, allow="exact", verbose=0)
    model.train_on_batch(x[:4], y[:4])
    before, error = state_of(model), None
    try:
        model.train_on_batch(x[:BATCH], y[:BATCH])
    except oomproof.CannotFitError as caught:
        error = caught
    guarded = changed(before, state_of(model))
    oomproof.unguard(model)
    model.reset_metrics()
    before, plain_error = state_of(model), None
    try:
        model.train_on_batch(x[:BATCH], y[:BATCH])
    except tf.errors.ResourceExhaustedError as caught:
        plain_error = type(caught).__name__
    plain = changed(before, state_of(model))
    report(model, path, None, guarded=guarded, plain=plain, error=str(error), plain_error=plain_error)


def budget(path):
    trained(path, budget=OPTIONS["budget"])


def steps(path):
    """Many tiny guarded steps: does the process grow?"""
    import psutil

    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(16, activation="relu"), keras.layers.Dense(1)])
    model.compile("adam", "mse", metrics=["mae"])
    oomproof.guard(model, **OPTIONS.get("guard", {}))
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(32 * 100, 8)).astype("float32"), rng.normal(size=(32 * 100, 1)).astype("float32")
    process, resident = psutil.Process(), []

    class Watch(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            resident.append(process.memory_info().rss)

    model.fit(x, y, batch_size=32, epochs=OPTIONS["steps"] // 100, verbose=0, callbacks=[Watch()])
    settled = np.array(resident[len(resident) // 4 :], "float64")
    slope = float(np.polyfit(np.arange(len(settled)), settled, 1)[0])
    report(model, path, None, slope=slope, grown=float(settled[-1] - settled[0]), steps=len(resident))


def wait(path):
    """What the allocator itself takes to say no."""
    began = time.perf_counter()
    try:
        tf.zeros((LIMIT * MIB,))
    except tf.errors.ResourceExhaustedError:
        print(json.dumps({"seconds": time.perf_counter() - began}))


class Keep(logging.Handler):
    def emit(self, record):
        LINES.append(record.getMessage())


if __name__ == "__main__":
    logging.getLogger("oomproof").addHandler(Keep())
    globals()[sys.argv[1]](sys.argv[3])
