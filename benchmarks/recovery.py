"""From cold under a hard limit: how many failures, how close to the largest piece that works, what a failure costs.

A grid of models and limits, one child process each on TensorFlow's real allocator. The largest piece that works is
found by trying: fixed sizes, ever larger, until one fails. Every failure waits ten seconds, so children run side by
side; on an otherwise idle machine the whole grid takes about ten minutes.
"""

from __future__ import annotations

import concurrent.futures
import json
import os
import statistics
import subprocess
import sys
import time
import unittest.mock
from typing import Any

BATCH = 256
SHARES = (0.75, 0.5, 0.35, 0.25, 0.15)
MODELS = ("tokens", "convolutions", "attention", "recurrent")
_AT_ONCE = 5
_PATIENCE_S = 600


def main() -> None:
    from _common import write_result

    with concurrent.futures.ThreadPoolExecutor(_AT_ONCE) as pool:
        wait = pool.submit(_child, "wait", 64)
        needs = dict(zip(MODELS, pool.map(lambda name: _child("need", 4096, name)["peak"], MODELS), strict=True))
        cells = [(name, int(needs[name] * share / 2**20)) for name in MODELS for share in SHARES]
        grid = list(pool.map(lambda cell: _child("cold", cell[1], cell[0]), cells))
        costs = list(pool.map(lambda name: _child("cost", int(needs[name] * 1.2 / 2**20), name), MODELS[:1] * 3))
    reached = [cell for cell in grid if "reached" in cell]
    write_result(
        "recovery",
        {
            "batch_size": BATCH,
            "at_most_2_ooms": sum(cell["ooms"] <= 2 for cell in reached) / len(grid),
            "at_least_70_percent": sum(cell["reached"] >= 0.7 * cell["largest"] for cell in reached) / len(grid),
            "median_share_reached": statistics.median(cell["reached"] / cell["largest"] for cell in reached),
            "allocator_wait_s": wait.result()["seconds"],
            "lost_beyond_wait_and_step_s": [cost["lost"] - cost["step"] - wait.result()["seconds"] for cost in costs],
            "grid": grid,
            "costs": costs,
        },
    )


def _child(what: str, limit: int, model: str = "tokens") -> Any:
    command = [sys.executable, __file__, what, model, str(limit)]
    env = {
        **os.environ,
        "KERAS_BACKEND": "tensorflow",
        "TF_CPU_ALLOCATOR_USE_BFC": "true",
        "TF_CPU_BFC_MEM_LIMIT_IN_MB": str(limit),
        "TF_ENABLE_ONEDNN_OPTS": "0",
        "TF_CPP_MIN_LOG_LEVEL": "3",
    }
    try:
        child = subprocess.run(command, env=env, capture_output=True, text=True, timeout=_PATIENCE_S)
    except subprocess.TimeoutExpired:
        # A recurrent net on a nearly full allocator: each of its many small requests may wait ten seconds.
        return {"model": model, "limit_mb": limit, "error": f"no answer within {_PATIENCE_S} s"}
    if child.returncode:
        return {"model": model, "limit_mb": limit, "error": child.stderr.strip().splitlines()[-1][:300]}
    answer = {"model": model, "limit_mb": limit, **json.loads(child.stdout.strip().splitlines()[-1])}
    print(answer, file=sys.stderr, flush=True)
    return answer


# In the child


def _model(name: str) -> tuple[Any, tuple[int, ...]]:
    import keras

    layers = keras.layers
    shape: tuple[int, ...]
    if name == "tokens":
        shape = (64, 8)
        stack = [
            layer for _ in range(4) for layer in (layers.Dense(64, activation="relu"), layers.LayerNormalization())
        ]
    elif name == "convolutions":
        shape = (32, 32, 3)
        stack = [
            layer
            for _ in range(3)
            for layer in (layers.Conv2D(24, 3, padding="same", activation="relu"), layers.LayerNormalization())
        ]
    elif name == "attention":
        shape = (48, 32)
        inputs = x = keras.Input(shape)
        for _ in range(2):
            x = layers.LayerNormalization()(x + layers.MultiHeadAttention(4, 8)(x, x))
            x = layers.LayerNormalization()(x + layers.Dense(32)(layers.Dense(128, activation="gelu")(x)))
        model = keras.Model(inputs, layers.Dense(10)(layers.Flatten()(x)))
        return _compiled(model), shape
    else:
        shape = (32, 16)
        stack = [layers.LSTM(64, return_sequences=True), layers.LSTM(64, return_sequences=True)]
    return _compiled(keras.Sequential([keras.Input(shape), *stack, layers.Flatten(), layers.Dense(10)])), shape


def _compiled(model: Any) -> Any:
    import keras

    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    return model


def _trained(name: str, **guarded: Any) -> tuple[Any, int]:
    """The run of three steps from cold, and how often memory ran out in it."""
    import keras
    import numpy as np

    import oomproof
    from oomproof._backends.tensorflow.device import TensorFlowMemory

    model, shape = _model(name)
    rng = np.random.default_rng(0)

    class Batches(keras.utils.PyDataset):  # type: ignore[misc]
        def __len__(self) -> int:
            return 3

        def __getitem__(self, index: int) -> Any:
            return rng.normal(size=(BATCH, *shape)).astype("float32"), rng.integers(0, 10, (BATCH, 1))

    # Failed probes count too: they wait as long as failed steps.
    failures, shortage = 0, TensorFlowMemory.shortage

    def counting(self: Any, error: BaseException) -> Any:
        nonlocal failures
        found = shortage(self, error)
        failures += found is not None
        return found

    # A plan is followed and no other made: here memory is to run out.
    oomproof.guard(model, plan=oomproof.Plan(), **guarded)
    with unittest.mock.patch.object(TensorFlowMemory, "shortage", counting):
        return model.fit(Batches(), verbose=0).run, failures


def need(name: str) -> dict[str, Any]:
    return {"peak": _trained(name)[0].peak}


def cold(name: str) -> dict[str, Any]:
    run, failures = _trained(name)
    reached = largest = _largest_piece(run.plan.micro_batch_size or BATCH)
    while largest < BATCH:
        larger = next(size for size in map(_largest_piece, range(largest + 1, BATCH + 1)) if size > largest)
        if _trained(name, micro_batch_size=larger)[1]:
            break
        largest = larger
    return {
        "ooms": failures,
        "reached": reached,
        "largest": largest,
        "seconds": run.seconds,
        "peak_mb": run.peak / 2**20,
        "events": [event.message for event in run.events],
    }


def _largest_piece(micro_batch_size: int) -> int:
    """Pieces are of even size: of 256 samples in pieces of at most 100, the largest has 86."""
    pieces = -(-BATCH // micro_batch_size)
    return -(-BATCH // pieces)


def cost(name: str) -> dict[str, Any]:
    """What one failure costs on a model that is warm: everything is traced, and only memory is missing."""
    import numpy as np
    import tensorflow as tf

    import oomproof

    model, shape = _model(name)
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(BATCH, *shape)).astype("float32"), rng.integers(0, 10, (BATCH, 1))
    oomproof.guard(model, plan=oomproof.Plan())
    whole = [_timed(lambda: model.train_on_batch(x, y)) for _ in range(8)]
    step = vars(model)["_oomproof_guard"]._driver.step
    # As `train_on_batch` passes it, so that nothing is left to be traced.
    split = [_timed(lambda: step.train((tf.constant(x), tf.constant(y), None), 4, False, None)) for _ in range(8)]
    train = step.train
    held: list[Any] = []

    def squeezed(*args: Any) -> Any:
        if not held:  # After oomproof has looked, and before the step.
            use = tf.config.experimental.get_memory_info("CPU:0")["current"]
            held.extend(tf.zeros((2**17,)) for _ in range(int((_limit() - use) * 0.6) // 2**19))
        return train(*args)

    step.train = squeezed
    total = _timed(lambda: model.train_on_batch(x, y))
    medians = statistics.median(whole[2:]), statistics.median(split[2:])
    return {"lost": total - medians[1], "step": medians[0], "split_step": medians[1]}


def _timed(call: Any) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def _limit() -> int:
    return int(os.environ["TF_CPU_BFC_MEM_LIMIT_IN_MB"]) * 2**20


def wait(name: str) -> dict[str, Any]:
    import tensorflow as tf

    began = time.perf_counter()
    try:
        tf.zeros((_limit(),))
    except tf.errors.ResourceExhaustedError:
        return {"seconds": time.perf_counter() - began}
    raise AssertionError("the allocator gave more than its limit")


if __name__ == "__main__":
    if len(sys.argv) == 1:
        main()
    else:
        print(json.dumps(globals()[sys.argv[1]](sys.argv[2])))
