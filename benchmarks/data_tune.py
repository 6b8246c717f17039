"""Pipelines as people write them, and the same after `oomproof.data.tune`: peak host memory and samples per second.

Memory: each in a process of its own, the growth of resident memory at its peak over a process that has imported
everything and made its inputs, with allocators that give memory back when it is freed (benchmarks/data_audit.py).
Speed: both in one process, half a second of epochs each in turn; nothing is done with the batches. The best of
the rounds counts, since other programs on a machine only ever make it slower; medians are in the file too.

    python benchmarks/data_tune.py
"""

from __future__ import annotations

import argparse
import concurrent.futures
import gc
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

from _common import write_result
from data_audit import EXACT, resident, warm_up

ROUNDS, SECONDS = 11, 0.5
# What a pipeline may hold. One cannot both have its cache and stay within: it is told how much slower that is.
BUDGETS = {
    "arrays_shuffled_and_batched": "300MiB",
    "arrays_scaled_then_shuffled": "200MiB",
    "arrays_scaled_cached_and_shuffled": "700MiB",
    "cache_that_does_not_fit": "200MiB",
    "arrays_augmented": "500MiB",
    "images_decoded_then_shuffled": "600MiB",
    "images_decoded_on_one_thread": "600MiB",
    "records_parsed_then_shuffled": "200MiB",
    "prefetched_before_batch": "200MiB",
}


def pipeline(name: str, folder: pathlib.Path) -> Iterator[Any]:
    """Makes the inputs of a pipeline at its first step, and yields the pipeline at each one after that."""
    import _data_pipelines

    return getattr(_data_pipelines, name)(folder)  # type: ignore[no-any-return]


def flush() -> None:
    """TensorFlow lets go of what it needed to read a NumPy array when it reads the next one."""
    import numpy as np
    import tensorflow as tf

    tf.constant(np.zeros(1))
    gc.collect()


def epochs(dataset: Any) -> tuple[int, float]:
    import tensorflow as tf

    samples, started = 0, time.perf_counter()
    while (taken := time.perf_counter() - started) < SECONDS:
        for batch in dataset:
            samples += int(tf.nest.flatten(batch)[0].shape[0])
            del batch
    return samples, taken


def memory(name: str, folder: pathlib.Path, tuned: bool) -> dict[str, Any]:
    from oomproof.data import tune

    warm_up()
    steps = pipeline(name, folder)
    next(steps)
    gc.collect()
    before = resident("VmRSS")
    dataset = next(steps)
    if tuned:
        dataset = tune(dataset, budget=BUDGETS[name], verbose=False)
    flush()
    pathlib.Path("/proc/self/clear_refs").write_text("5")
    for _ in range(2):
        iterator = iter(dataset)
        for step, batch in enumerate(iterator):
            time.sleep(0.2 if step < 5 else 0.0)
            del batch
        del iterator
    found: dict[str, Any] = {"peak": resident("VmHWM") - before}
    if tuned:
        found |= {"budget": dataset.tuning.budget, "predicted": dataset.tuning.after.host_bytes}
        found |= {"changes": list(dataset.tuning.changes), "kept": list(dataset.tuning.kept)}
    return found


def speed(name: str, folder: pathlib.Path) -> dict[str, Any]:
    from oomproof.data import tune

    warm_up()
    steps = pipeline(name, folder)
    next(steps)
    pair = {"plain": next(steps), "tuned": tune(next(steps), budget=BUDGETS[name], verbose=False)}
    rates: dict[str, list[float]] = {"plain": [], "tuned": []}
    for turn in range(ROUNDS + 1):
        for which in ("plain", "tuned") if turn % 2 else ("tuned", "plain"):
            samples, seconds = epochs(pair[which])
            # The first epoch fills caches and finds out how many threads are best.
            rates[which] += [samples / seconds] * bool(turn)
    best = {which: max(found) for which, found in rates.items()}
    medians = {which: statistics.median(found) for which, found in rates.items()}
    return {**best, "ratio": best["tuned"] / best["plain"], "medians": medians}


def child(job: str, name: str, settings: dict[str, str]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, name, "--job", job, "--folder", folder]
        environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "-1", **settings}
        answer = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600)
    if answer.returncode:
        raise RuntimeError(f"{job} {name} failed:\n{answer.stderr[-2000:]}")
    return json.loads(answer.stdout.splitlines()[-1])  # type: ignore[no-any-return]


def main(names: list[str]) -> None:
    rows: dict[str, Any] = {}
    for name in names or BUDGETS:
        row: dict[str, Any] = {"samples_per_second": child("speed", name, {})}
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            peaks_of = [pool.submit(child, which, name, EXACT) for which in ("plain", "tuned")]
            exact = {which: found.result() for which, found in zip(("plain", "tuned"), peaks_of, strict=True)}
        row |= {"memory": exact, "plain_within_budget": exact["plain"]["peak"] <= exact["tuned"]["budget"]}
        ratio = row["samples_per_second"]["ratio"]
        row["within_budget"] = exact["tuned"]["peak"] <= exact["tuned"]["budget"]
        row["not_slower"] = ratio >= 0.97
        rows[name] = row
        peaks = " ".join(f"{which} {exact[which]['peak'] / 1e6:6.1f} MB" for which in ("plain", "tuned"))
        print(f"{name:36} {peaks} speed ×{ratio:.2f} {exact['tuned']['changes']}", file=sys.stderr, flush=True)
    summary = {key: sum(row[key] for row in rows.values()) for key in ("within_budget", "not_slower")}
    write_result("data_tune", {"pipelines": len(rows), "summary": summary, "settings": EXACT, "rows": rows})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--job", choices=("plain", "tuned", "speed"))
    parser.add_argument("--folder", type=pathlib.Path)
    arguments = parser.parse_args()
    if arguments.job == "speed":
        print(json.dumps(speed(arguments.names[0], arguments.folder)))
    elif arguments.job:
        print(json.dumps(memory(arguments.names[0], arguments.folder, arguments.job == "tuned")))
    else:
        main(arguments.names)
