"""Predicted host bytes of tf.data pipelines against the memory that is resident when they run.

Each pipeline runs in a process of its own. Measured is the growth of resident memory at its peak, over a process that
has imported everything, run tiny pipelines and made its inputs. The first elements are taken slowly, so that buffers
fill up. Twice: with allocators that give memory back when it is freed ("exact": what is held is what is resident), and
as TensorFlow comes ("as it comes": oneDNN's allocator and glibc keep some of what was freed).

    python benchmarks/data_audit.py
"""

from __future__ import annotations

import argparse
import concurrent.futures
import gc
import json
import os
import pathlib
import re
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

from _common import write_result

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


def child(job: str, names: list[str], settings: dict[str, str]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--job", job, "--folder", folder, *names]
        # On a CPU, whatever there is: what a GPU's driver maps is not the pipeline's.
        environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "-1", **settings}
        answer = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600)
    if answer.returncode:
        raise RuntimeError(f"{job} {names} failed:\n{answer.stderr[-2000:]}")
    return json.loads(answer.stdout.splitlines()[-1])  # type: ignore[no-any-return]


def main(names: list[str]) -> None:
    if not names:
        answer = child("list", [], {})
        names = answer["names"]
    rows: dict[str, dict[str, Any]] = {name: {} for name in names}
    # Two at a time: that changes when memory is taken, and not how much.
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        for mode, settings in MODES.items():
            predicted = child("predict", names, settings)
            measured = pool.map(lambda name, settings=settings: child("measure", [name], settings), names)
            for name, found in zip(names, measured, strict=True):
                row = {**predicted[name], **found}
                row["error"] = row["predicted"] / row["measured"] - 1
                rows[name][mode] = row
                sizes = f"{row['predicted'] / 1e6:8.1f} MB predicted {row['measured'] / 1e6:8.1f} MB measured"
                print(f"{mode:12} {name:32} {sizes} {row['error']:+7.1%}", file=sys.stderr, flush=True)
    summary = {}
    for mode in MODES:
        errors = [abs(row[mode]["error"]) for row in rows.values()]
        summary[mode] = {
            "median_error": statistics.median(errors),
            "largest_error": max(errors),
            "within_5_percent": sum(error <= 0.05 for error in errors),
        }
    write_result("data_audit", {"pipelines": len(names), "summary": summary, "settings": MODES, "rows": rows})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--job", choices=("list", "measure", "predict"))
    parser.add_argument("--folder", type=pathlib.Path)
    arguments = parser.parse_args()
    if arguments.job == "measure":
        print(json.dumps(measure(arguments.names[0], arguments.folder)))
    elif arguments.job == "predict":
        print(json.dumps(predict(arguments.names, arguments.folder)))
    elif arguments.job == "list":
        from _data_zoo import PIPELINES

        print(json.dumps({"names": list(PIPELINES)}))
    else:
        main(arguments.names)
