"""How long an estimate of ResNet50 takes, beyond importing and building, and the memory it has taken by then.

    python benchmarks/estimate_time.py

One process for each backend, mode and engine, one after the other. Engine "compile" is timed where the extra
`gpu-compile` is installed. TensorFlow's programs are compiled in another process, while the first one waits: "resident"
is the most that any one process held at any time.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from typing import Any

from _common import write_result

MODEL, BATCH, GPU = "ResNet50", 128, "h200"
CASES = [
    ("jax", True, "trace"),
    ("torch", False, "trace"),
    ("tensorflow", False, "trace"),
    ("tensorflow", True, "trace"),
    ("jax", True, "compile"),
    ("tensorflow", True, "compile"),
]


def timed(jit: bool, engine: str) -> dict[str, Any] | None:
    import keras

    import oomproof

    model = getattr(keras.applications, MODEL)(weights=None)
    model.compile("adam", "categorical_crossentropy")
    try:
        found = oomproof.estimate(model, BATCH, gpu=GPU, engine=engine, jit=jit)
    except oomproof.BackendError:
        return None
    processes = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    resident = 1024 * max(resource.getrusage(each).ru_maxrss for each in processes)
    return {"seconds": found.seconds, "resident": resident, "expected": found.expected}


def main() -> None:
    if len(sys.argv) > 1:
        print(json.dumps(timed(sys.argv[1] == "True", sys.argv[2])))
        return
    rows = []
    for backend, jit, engine in CASES:
        quiet = {"KERAS_BACKEND": backend, "TF_CPP_MIN_LOG_LEVEL": "3", "JAX_PLATFORMS": "cpu"}
        command = [sys.executable, __file__, str(jit), engine]
        done = subprocess.run(command, env=os.environ | quiet, capture_output=True, text=True, check=True)
        figures = json.loads(done.stdout.splitlines()[-1])
        if figures is not None:
            rows.append({"backend": backend, "jit": jit, "engine": engine, **figures})
    write_result("estimate-time", {"model": MODEL, "batch": BATCH, "gpu": GPU, "rows": rows})


if __name__ == "__main__":
    main()
