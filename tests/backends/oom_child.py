"""One scenario under a memory limit that is real, in a process of its own (see oom_memory.py for how).

    KERAS_BACKEND=jax python oom_child.py SCENARIO LIMIT_MB OUT.npz [JSON OPTIONS]

Prints one JSON line and writes the final weights to OUT.npz. A limit of 0 means none: the reference runs.
"""

from __future__ import annotations

import json
import logging
import os
import sys

if os.environ.get("KERAS_BACKEND") in ("jax", "torch"):
    # Keras imports TensorFlow wherever it is installed, which takes each process seconds and hundreds of megabytes.
    sys.modules["tensorflow"] = None

import keras
import numpy as np
import oom_memory
import psutil
from oom_memory import MIB
from oom_models import (
    BATCH,
    Ballast,
    Counting,
    Recorder,
    changed,
    lost,
    number,
    sequences,
    state_of,
    table_net,
    token_net,
    warm_up,
    wide_net,
)

import oomproof
from oomproof._records.run import Run

BACKEND = keras.backend.backend()
LINES: list[str] = []  # What oomproof logged.
# A plan is followed and no other made: here memory is to run out.
RECOVERY = {"plan": oomproof.Plan()}


def unseen_ballast(model, mib_at):
    """Memory that disappears after oomproof has looked and before the step runs: no prediction helps."""
    guard = vars(model)["_oomproof_guard"]
    step = guard._ready().step
    original, held = step.train, {}

    def train(*args):
        calls = held["calls"] = held.get("calls", -1) + 1
        if calls in mib_at:
            held["ballast"] = MEMORY.ballast(mib_at[calls])
        return original(*args)

    step.train = train
    return held


def report(model, path, history=None, **extra):
    with MEMORY.outside():
        np.savez(path, *model.get_weights())
    run = getattr(history, "run", None)
    answer = {"run": None if run is None else run.to_dict(), "ooms": None if run is None else run.ooms}
    if history is not None:
        answer["losses"] = history.history.get("loss")
        answer["val_losses"] = history.history.get("val_loss")
    print(json.dumps({**answer, "lines": LINES, **extra}))


def trained(path, callbacks=(), epochs=2, prepare=None, **guarded):
    """fit under guard, with everything recorded that every scenario promises."""
    model, data, recorder = token_net(), Counting(sequences()), Recorder(MEMORY)
    if LIMIT:
        oomproof.guard(model, **(guarded or RECOVERY))
        if prepare:
            prepare(model)
    history = model.fit(data, epochs=epochs, verbose=2, shuffle=False, callbacks=[*callbacks, recorder])
    facts = {name: getattr(recorder, name) for name in ("current", "peaks", "iterations", "seen", "resident")}
    report(model, path, history, pulls=data.pulls, **facts)


# The scenarios


def reference(path):
    trained(path, epochs=OPTIONS.get("epochs", 2))


def first_step(path):
    trained(path)


def ballast_seen(path):
    trained(path, [Ballast(MEMORY, OPTIONS["ballast"], (0, 2), 2)], epochs=4)


def ballast_unseen(path):
    trained(path, epochs=4, prepare=lambda model: unseen_ballast(model, {2: OPTIONS["ballast"], 9: 0}))


def repeatedly(path):
    """Every epoch memory comes back and is taken away again, by another amount."""
    rng = np.random.default_rng(OPTIONS.get("seed", 0))
    model, data, epochs, recorder = token_net(), Counting(sequences()), OPTIONS["epochs"], Recorder(MEMORY)
    # Where memory cannot be measured pieces never grow again, so each epoch has to leave less than the one before.
    left = iter(OPTIONS.get("leave", ()))
    oomproof.guard(model, **RECOVERY)
    guard = vars(model)["_oomproof_guard"]
    step = guard._ready().step
    original, held = step.train, []

    def train(*args):
        if not held:
            mib = rng.integers(*OPTIONS["between"]) if "between" in OPTIONS else MEMORY.free() // MIB - next(left)
            held.append(MEMORY.ballast(int(mib)))
        return original(*args)

    class GiveBack(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            held.clear()

    step.train = train
    history = model.fit(data, epochs=epochs, verbose=0, shuffle=False, callbacks=[GiveBack(), recorder])
    facts = {name: getattr(recorder, name) for name in ("iterations", "seen", "resident")}
    report(model, path, history, pulls=data.pulls, **facts)


def anew(path):
    """Every epoch is a run of its own, which knows nothing of the one before, so each runs out of memory again."""
    model, data, recorder, losses, ooms = token_net(), Counting(sequences()), Recorder(MEMORY), [], []
    for epoch in range(OPTIONS["epochs"]):
        MEMORY.renew()
        calls = {"initial_epoch": epoch, "epochs": epoch + 1, "verbose": 0, "shuffle": False, "callbacks": [recorder]}
        history = oomproof.fit(model, data, **calls, **RECOVERY) if LIMIT else model.fit(data, **calls)
        losses += history.history["loss"]
        ooms.append(history.run.ooms if LIMIT else 0)
    facts = {name: getattr(recorder, name) for name in ("iterations", "seen", "resident")}
    report(model, path, None, losses=losses, pulls=data.pulls, ooms=ooms, **facts)


def validation(path):
    """Training batches of 16 fit; a validation batch of all samples does not."""
    model, (x, y) = token_net(), sequences()
    data, held_out = Counting((x, y), 16), Counting((x, y), len(x))
    if LIMIT:
        oomproof.guard(model, **RECOVERY)
    history = model.fit(data, epochs=1, verbose=2, shuffle=False, validation_data=held_out)
    report(model, path, history, val_pulls=held_out.pulls, iterations=number(model.optimizer.iterations))


def predict(path):
    model, (x, _) = token_net(), sequences()
    if LIMIT:
        oomproof.guard(model, **RECOVERY)
    outputs = model.predict(Counting((x,), len(x)), verbose=2)
    np.savez(path, outputs)
    print(json.dumps({"lines": LINES, "shape": outputs.shape}))


def commit(path):
    model, (x, y) = table_net()
    if LIMIT:
        oomproof.guard(model, **RECOVERY)
    data = Counting((x, y), 64)
    before, error, history = None, None, None

    class Before(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            nonlocal before
            with MEMORY.outside():
                before = state_of(self.model)

    try:
        history = model.fit(data, epochs=2, verbose=2, shuffle=False, callbacks=[Before()])
    except oomproof.RecoveryFailedError as caught:
        error = caught
    run = error.run if error else getattr(history, "run", None)
    moved = []
    if error:
        with MEMORY.outside():
            moved = changed(before, state_of(model))
    kinds = [[e.kind, e.before, e.after] for e in run.events] if run else []
    extra = {"error": str(error)} if error else {}
    report(
        model, path, history, kinds=kinds, changed=moved,
        iterations=number(model.optimizer.iterations), lean=bool(run and run.plan.lean_commit), pulls=data.pulls,
        **extra,
    )  # fmt: skip


def hopeless(path):
    """From the second epoch on, not even one sample fits."""
    model, data = wide_net(), Counting(sequences(16), 8)
    oomproof.guard(model, **RECOVERY)
    vault = {}

    class Squeeze(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 1:
                with MEMORY.outside():
                    vault["state"] = state_of(self.model)
                vault["ballast"] = MEMORY.ballast(MEMORY.free() // MIB - 1)

    try:
        model.fit(data, epochs=3, verbose=2, shuffle=False, callbacks=[Squeeze()])
    except oomproof.RecoveryFailedError as error:
        with MEMORY.outside():
            moved = changed(vault["state"], state_of(model))
        # Memory is still as scarce as it was: a model that can be saved only afterwards may never be.
        model.save(path.replace(".npz", ".keras"))
        vault.clear()
        again = keras.models.load_model(path.replace(".npz", ".keras"), compile=False)
        same = all(np.array_equal(a, b) for a, b in zip(again.get_weights(), model.get_weights(), strict=True))
        steps = number(model.optimizer.iterations)
        # And training goes on from here once there is room again.
        model.fit(data, epochs=1, verbose=0, shuffle=False)
        report(
            model, path, None, message=str(error), cause=type(error.__cause__).__name__, moved=moved, saved=same,
            run_is_there=isinstance(error.run, Run), epochs=error.history.epoch, run_steps=error.run.steps,
            kinds=[[e.kind, e.before, e.after] for e in error.run.events], iterations=steps,
        )  # fmt: skip


def transactional(path):
    """An un-split step that fails changes nothing under guard; plain Keras leaves a half-made step behind."""
    model, (x, y) = token_net(norm=keras.layers.BatchNormalization, count=False), sequences()
    oomproof.guard(model, allow="exact", verbose=0, **RECOVERY)
    model.train_on_batch(x[:4], y[:4])
    before, error = state_of(model), None
    try:
        model.train_on_batch(x[:BATCH], y[:BATCH])
    except oomproof.CannotFitError as caught:
        error = caught
    guarded = changed(before, state_of(model))
    oomproof.unguard(model)
    np.savez(path, *model.get_weights())
    model.reset_metrics()
    before, plain_error = state_of(model), None
    try:
        model.train_on_batch(x[:BATCH], y[:BATCH])
    except Exception as caught:
        plain_error = type(caught).__name__
    gone = lost(model)
    plain = [] if gone else changed(before, state_of(model))
    print(
        json.dumps({"guarded": guarded, "plain": plain, "lost": gone, "error": str(error), "plain_error": plain_error})
    )


def budget(path):
    trained(path, budget=OPTIONS["budget"])


def steps(path):
    """Many tiny guarded steps: does the process grow?"""
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


class Keep(logging.Handler):
    def emit(self, record):
        LINES.append(record.getMessage())


def main(scenario, limit, path, options):
    global LIMIT, OPTIONS, MEMORY
    LIMIT, OPTIONS, MEMORY = limit, options, oom_memory.limited(BACKEND, limit)
    if "floatx" in options:
        keras.config.set_floatx(options["floatx"])
        keras.config.set_dtype_policy(options["floatx"])
    logging.getLogger("oomproof").addHandler(Keep())
    MEMORY.start(warm_up)
    globals()[scenario](path)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3], json.loads(sys.argv[4]) if len(sys.argv) > 4 else {})
