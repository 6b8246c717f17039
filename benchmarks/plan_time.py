"""How long it takes to plan ResNet50, beyond importing and building, and to find the plan again.

    python benchmarks/plan_time.py

One process for each backend, one after the other. Of the three figures the first is the first plan of a process, which
loads what it needs; the second is a plan for another budget; the third is the first plan again, as it is on disk.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from typing import Any

from _common import write_result

MODEL, BATCH, BUDGETS = "ResNet50", 128, ("8GiB", "6GiB")


def timed() -> dict[str, Any]:
    import keras

    import oomproof

    model = getattr(keras.applications, MODEL)(weights=None)
    model.compile("adam", "categorical_crossentropy")
    found = []
    for budget in (*BUDGETS, BUDGETS[0]):
        began = time.perf_counter()
        plan = oomproof.plan(model, BATCH, budget=budget)
        found.append((time.perf_counter() - began, plan.sentence))
    (first, sentence), (other, _), (again, _) = found
    return {"first": first, "other_budget": other, "again": again, "plan": sentence}


def main() -> None:
    if sys.argv[1:] == ["--child"]:
        print(json.dumps(timed()))
        return
    rows = {}
    for backend in ("jax", "torch", "tensorflow"):
        with tempfile.TemporaryDirectory() as folder:
            more = {"KERAS_BACKEND": backend, "TF_CPP_MIN_LOG_LEVEL": "3", "OOMPROOF_CACHE_DIR": folder}
            command = [sys.executable, __file__, "--child"]
            done = subprocess.run(command, env=os.environ | more, capture_output=True, text=True, check=True)
        rows[backend] = json.loads(done.stdout.splitlines()[-1])
    write_result("plan-time", {"model": MODEL, "batch": BATCH, "budgets": BUDGETS, "seconds": rows})


if __name__ == "__main__":
    main()
