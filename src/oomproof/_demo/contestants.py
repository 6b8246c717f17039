"""The four ways of training that the demo compares, and the child process that runs one of them.

    python -m oomproof._demo.contestants NAME BATCH_SIZE FOLDER

trains and leaves FOLDER/NAME.json and FOLDER/NAME.npz. The parent has set the memory limit in the environment.
"""

from __future__ import annotations

import json
import pathlib
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from oomproof._demo.workload import CLIPS, EPOCHS, Clips, build_model


def plain(model: Any, clips: Clips, batch_size: int, **options: Any) -> Any:
    return model.fit(clips.batches(batch_size), **options)


def halving(model: Any, clips: Clips, batch_size: int, **options: Any) -> Any:
    import tensorflow as tf

    while True:
        try:
            return model.fit(clips.batches(batch_size), **options)
        except tf.errors.ResourceExhaustedError:
            if batch_size == 1:
                raise
            batch_size //= 2


def guarded(model: Any, clips: Clips, batch_size: int, **options: Any) -> Any:
    import oomproof

    oomproof.guard(model)
    return model.fit(clips.batches(batch_size), **options)


CONTESTANTS: dict[str, Callable[..., Any]] = {
    "unlimited": plain,
    "plain": plain,
    "halving": halving,
    "oomproof": guarded,
}


def _counter(clips: Clips) -> Any:
    """A callback that counts how often each clip was in a batch whose step went through, and the calls of fit."""
    import keras

    class Counter(keras.callbacks.Callback):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.seen = np.zeros(CLIPS, int)
            self.fits: list[dict[str, int]] = []

        def on_train_begin(self, logs: Any = None) -> None:
            self.fits.append({"batch_size": 0, "batches": 0})

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            clips_of_batch = clips.handed_out[batch]
            self.seen[clips_of_batch.start : clips_of_batch.stop] += 1
            fit = self.fits[-1]
            fit["batch_size"] = max(fit["batch_size"], len(clips_of_batch))
            fit["batches"] += 1

    return Counter()


def _peak_of_process() -> Callable[[], int]:
    """Reads the allocator's peak since now, whoever resets it in between (oomproof does, to measure a step)."""
    import tensorflow as tf

    memory, peaks = tf.config.experimental, [0]
    reset = memory.reset_memory_stats

    def peak() -> int:
        peaks.append(memory.get_memory_info("CPU:0")["peak"])
        return max(peaks)

    def remember_and_reset(device: str) -> None:
        peak()
        reset(device)

    memory.reset_memory_stats = remember_and_reset
    return peak


def train(name: str, batch_size: int, folder: pathlib.Path) -> None:
    """Trains once and writes what was measured, whether training finished or not."""
    clips, model, peak = Clips(), build_model(), _peak_of_process()
    counter = _counter(clips)
    (folder / f"{name}.started").touch()
    history, error, started = None, None, time.perf_counter()
    try:
        history = CONTESTANTS[name](model, clips, batch_size, epochs=EPOCHS, verbose=0, callbacks=[counter])
    except Exception as exception:  # the outcome is what the demo is about, whatever it is
        error = exception
    seconds = time.perf_counter() - started
    run = getattr(history, "run", None) or getattr(error, "run", None)
    result = {
        "finished": error is None,
        "error": None if error is None else type(error).__name__,
        "message": None if error is None else str(error),
        "seen_least": int(counter.seen.min()),
        "seen_most": int(counter.seen.max()),
        "fits": counter.fits,
        "iterations": int(model.optimizer.iterations.numpy()),
        "accuracy": history.history["accuracy"][-1] if history else None,
        "peak": peak(),
        "seconds": seconds,
        "run": run.to_dict() if run else None,
    }
    np.savez(folder / f"{name}.npz", *model.get_weights())
    # Renamed when complete: the parent may look at any moment.
    unfinished = folder / f"{name}.json.part"
    unfinished.write_text(json.dumps(result))
    unfinished.rename(folder / f"{name}.json")


if __name__ == "__main__":
    train(sys.argv[1], int(sys.argv[2]), pathlib.Path(sys.argv[3]))
