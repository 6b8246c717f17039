"""TensorFlow's traced steps against what real steps take from its real allocator, on a CPU.

    python benchmarks/estimate_allocator.py

The models and the measuring are those of tests/backends (trace_models.py, trace_child.py). Two errors each: of the
bytes that are asked for, and of the peak that the allocator reports, which counts the blocks it gave for them.
TensorFlow orders what it optimises by hashes that differ from process to process, and some peaks with it: what was
measured is the median of five processes.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import pathlib
import statistics
import subprocess
import sys
from typing import Any

from _common import write_result

PROCESSES = 5
TESTS = pathlib.Path(__file__).parents[1] / "tests" / "backends"
os.environ |= {"KERAS_BACKEND": "tensorflow", "TF_CPP_MIN_LOG_LEVEL": "3"}
sys.path.insert(0, str(TESTS))


def main() -> None:
    from oomproof._estimation.allocator import replay

    measured = importlib.import_module("test_trace_tensorflow")
    names = sorted(measured.MODELS)
    child = [sys.executable, str(TESTS / "trace_child.py"), *names]
    runs = []
    for _ in range(PROCESSES):
        done = subprocess.run(child, capture_output=True, text=True, cwd=TESTS, check=True)
        runs.append(json.loads(done.stdout.splitlines()[-1]))
    rows: list[dict[str, Any]] = []
    for name in names:
        found = measured.traced(name)
        # The child has made one region for everything, as on a GPU, where a CPU takes a new one whenever it needs more.
        asked, reported = measured.peak(found)[0], replay(dataclasses.replace(found, allocator="bfc")).peak
        real = {figure: statistics.median(run[name][figure] for run in runs) for figure in runs[0][name]}
        errors = {"asked_for": asked / real["asked for"] - 1, "reported": reported / real["peak"] - 1}
        peaks = [run[name]["peak"] for run in runs]
        rows.append({"model": name, "measured": real, "spread": max(peaks) / min(peaks) - 1, "error": errors})
    summary = {
        kind: {
            "median": statistics.median(abs(row["error"][kind]) for row in rows),
            "worst": max((row["error"][kind] for row in rows), key=abs),
        }
        for kind in ("asked_for", "reported")
    }
    write_result("estimate-allocator", {**summary, "rows": rows})


if __name__ == "__main__":
    main()
