"""Predicted host bytes of data pipelines against the memory that is resident when they run.

Each pipeline runs in a process of its own. Measured is the growth of resident memory at its peak, over a process that
has imported everything, run tiny pipelines and made its inputs. The first elements are taken slowly, so that buffers
fill up. Twice: with allocators that give memory back when it is freed ("exact": what is held is what is resident), and
as TensorFlow comes ("as it comes": oneDNN's allocator and glibc keep some of what was freed).

What else `fit` takes (arrays, PyDatasets, DataLoaders, generators) is given to `fit` of a model that does next to
nothing, on each backend that is installed, after a `fit` with two batches of the same kind. Memory is that of the
process and of the workers it started, looked at every 5 ms, with allocators that give back.

    python benchmarks/data_audit.py                    # all
    python benchmarks/data_audit.py arrays_batched     # some of them
"""

from __future__ import annotations

import argparse
import concurrent.futures
import gc
import itertools
import json
import os
import pathlib
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable
from typing import Any

from _common import RESULTS, write_result

EXACT = {"TF_ENABLE_ONEDNN_OPTS": "0", "MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "32768"}
MODES: dict[str, dict[str, str]] = {"exact": EXACT, "as it comes": {}}
SLOW_STEPS, MOST_STEPS = 5, 400


def resident(name: str) -> int:
    found = re.search(rf"^{name}:\s+(\d+) kB", pathlib.Path("/proc/self/status").read_text(), flags=re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024


def warm_up() -> None:
    """Loads what a first pipeline loads."""
    import numpy as np
    import tensorflow as tf

    small = tf.data.Dataset.from_tensor_slices(np.zeros((64, 8), np.float32)).map(lambda x: x + 1, num_parallel_calls=2)
    for dataset in (small.shuffle(8).cache().batch(8).prefetch(2), small.batch(4), small.prefetch(tf.data.AUTOTUNE)):
        for _ in dataset:
            pass


def measure(name: str, folder: pathlib.Path) -> dict[str, Any]:
    import numpy as np
    import tensorflow as tf

    from _data_zoo import PIPELINES

    warm_up()
    steps = PIPELINES[name](folder)
    next(steps)
    gc.collect()
    before = resident("VmRSS")
    dataset = next(steps)
    # TensorFlow lets go of what it needed to read a NumPy array when it reads the next one, as it does in any program.
    tf.constant(np.zeros(1))
    gc.collect()
    # The peak from here on: making the dataset is over.
    pathlib.Path("/proc/self/clear_refs").write_text("5")
    taken = 0
    for _ in range(2):
        iterator, first = iter(dataset), taken
        while taken < MOST_STEPS and (element := next(iterator, None)) is not None:
            taken += 1
            time.sleep(0.3 if taken - first <= SLOW_STEPS else 0.0)
            # As in Keras's fit on TensorFlow, a batch is let go before the next is asked for.
            del element
        del iterator
    return {"measured": resident("VmHWM") - before, "steps": taken}


def predict(names: list[str], folder: pathlib.Path) -> dict[str, Any]:
    from _data_zoo import PIPELINES
    from oomproof.data import audit

    found: dict[str, Any] = {}
    for name in names:
        inside = folder / name
        inside.mkdir()
        steps = PIPELINES[name](inside)
        next(steps)
        started = time.perf_counter()
        report = audit(next(steps))
        found[name] = {"predicted": report.host_bytes, "seconds": time.perf_counter() - started}
        if report.unknown:
            found[name]["unknown"] = list(report.unknown)
    return found


def resident_with_workers() -> int:
    """Of this process and those it started, what they share counted once."""
    children = [each.read_text().split() for each in pathlib.Path("/proc/self/task").glob("*/children")]
    held = 0
    for pid in ("self", *itertools.chain.from_iterable(children)):
        try:
            text = pathlib.Path(f"/proc/{pid}/smaps_rollup").read_text()
        except OSError:
            continue  # It has ended.
        found = re.search(r"^Pss:\s+(\d+) kB", text, flags=re.MULTILINE)
        held += int(found[1]) * 1024 if found else 0
    return held


def measure_fit(name: str, _: pathlib.Path) -> dict[str, Any]:
    """Predicted and measured in one process: what is predicted depends on Keras's backend."""
    from _data_fits import BATCHES, DATA, fit, model_for
    from oomproof.data import audit

    model, make = model_for(name), DATA[name]
    fit(model, name, make(2), epochs=2)
    gc.collect()
    before = resident_with_workers()
    made = make(BATCHES)
    report = audit(made, batch_size=batch_size_of(made))
    gc.collect()
    peak, stop = [0], threading.Event()

    def look() -> None:
        while not stop.wait(0.005):
            peak[0] = max(peak[0], resident_with_workers())

    watching = threading.Thread(target=look)
    watching.start()
    fit(model, name, made, epochs=2)
    stop.set()
    watching.join()
    stages = {stage.name: stage.bytes for stage in report.stages}
    return {"predicted": report.host_bytes, "measured": peak[0] - before, "stages": stages}


def batch_size_of(made: Any) -> int | None:
    from _data_fits import BATCH, BATCHES

    return len(made[0]) // BATCHES if isinstance(made, tuple) and len(made[0]) >= BATCH else None


def child(job: str, names: list[str], settings: dict[str, str]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--job", job, "--folder", folder, *names]
        # On a CPU, whatever there is: what a GPU's driver maps is not the pipeline's.
        environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "-1", **settings}
        answer = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600)
    if answer.returncode:
        raise RuntimeError(f"{job} {names} failed:\n{answer.stderr[-2000:]}")
    return json.loads(answer.stdout.splitlines()[-1])  # type: ignore[no-any-return]


def main(names: list[str], backends: list[str]) -> None:
    known = child("list", [], {})
    pipelines = [name for name in known["pipelines"] if not names or name in names]
    fits = [name for name in known["fits"] if not names or name in names]
    # What is not asked for this time stays as it was measured before.
    path = RESULTS / "data_audit.json"
    earlier = json.loads(path.read_text()) if path.exists() else {}
    rows = {name: earlier.get("rows", {}).get(name, {}) for name in known["pipelines"]}
    # Two at a time: that changes when memory is taken, and not how much.
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        for mode, settings in MODES.items() if pipelines else ():
            predicted = child("predict", pipelines, settings)
            measured = pool.map(lambda name, settings=settings: child("measure", [name], settings), pipelines)
            for name, found in zip(pipelines, measured, strict=True):
                rows[name][mode] = told(mode, name, {**predicted[name], **found})
    rows = {name: row for name, row in rows.items() if row}
    result: dict[str, Any] = {"pipelines": len(rows)}
    result["summary"] = {mode: summary(row[mode] for row in rows.values()) for mode in MODES if rows}
    result |= {"settings": MODES, "rows": rows, "fits": earlier.get("fits", {})}
    for backend in backends if fits else ():
        settings = EXACT | {"KERAS_BACKEND": backend}
        # Worker processes are forked, and a fork of a process with TensorFlow's or JAX's threads may wait for ever.
        here = [name for name in fits if backend == "torch" or name != "data_loader_with_workers"]
        measured_here = {name: told(backend, name, child("fit", [name], settings)) for name in here}
        found = result["fits"].get(backend, {}).get("rows", {}) | measured_here
        result["fits"][backend] = {"summary": summary(found.values()), "rows": found}
    write_result("data_audit", result)


def told(where: str, name: str, row: dict[str, Any]) -> dict[str, Any]:
    row["error"] = row["predicted"] / row["measured"] - 1
    sizes = f"{row['predicted'] / 1e6:8.1f} MB predicted {row['measured'] / 1e6:8.1f} MB measured"
    print(f"{where:12} {name:32} {sizes} {row['error']:+7.1%}", file=sys.stderr, flush=True)
    return row


def summary(rows: Iterable[dict[str, Any]]) -> dict[str, Any]:
    errors = [abs(row["error"]) for row in rows]
    return {
        "median_error": statistics.median(errors),
        "largest_error": max(errors),
        "within_5_percent": sum(error <= 0.05 for error in errors),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--backends", nargs="*", default=["tensorflow", "jax", "torch"], help="for what `fit` is given")
    parser.add_argument("--job", choices=("list", "measure", "predict", "fit"))
    parser.add_argument("--folder", type=pathlib.Path)
    arguments = parser.parse_args()
    if arguments.job == "measure":
        print(json.dumps(measure(arguments.names[0], arguments.folder)))
    elif arguments.job == "fit":
        print(json.dumps(measure_fit(arguments.names[0], arguments.folder)))
    elif arguments.job == "predict":
        print(json.dumps(predict(arguments.names, arguments.folder)))
    elif arguments.job == "list":
        from _data_fits import DATA
        from _data_zoo import PIPELINES

        print(json.dumps({"pipelines": list(PIPELINES), "fits": list(DATA)}))
    else:
        main(arguments.names, arguments.backends)
