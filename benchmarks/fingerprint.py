"""How long the fingerprint of a model takes, beside a guarded step of it. The house rule is 1 ms for ResNet50.

    python benchmarks/fingerprint.py

One process for each backend, one after the other. It is taken when `fit`, `evaluate`, `predict` and `*_on_batch` begin
and when Keras makes a function anew, and not in every step: `share` is its part of a call that runs a single step.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from _common import write_result

_REPEATS = 200
_STEPS = 5
_LIMIT_S = 0.001


def small() -> Any:
    import keras

    layers = [keras.layers.Dense(64, "relu"), keras.layers.Dropout(0.1), keras.layers.Dense(10, "softmax")]
    return keras.Sequential([keras.Input((32,)), *layers])


def resnet50() -> Any:
    import keras

    return keras.applications.ResNet50(weights=None, input_shape=(64, 64, 3), classes=10)


MODELS = {"small": small, "ResNet50": resnet50}


def seconds(function: Callable[[], Any], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        function()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def timed(name: str) -> dict[str, Any]:
    import numpy as np

    import oomproof
    from oomproof._backends.common.fingerprint import Fingerprint

    model = MODELS[name]()
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    oomproof.guard(model)
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(8, *model.input_shape[1:])).astype("float32"), rng.integers(0, 10, (8, 1))
    model.train_on_batch(x, y)
    taken = seconds(lambda: Fingerprint(model), _REPEATS)
    step = seconds(lambda: model.train_on_batch(x, y), _STEPS)
    return {"layers": len(model._flatten_layers()), "fingerprint_s": taken, "step_s": step, "share": taken / step}


def main() -> None:
    if sys.argv[1:] == ["--child"]:
        print(json.dumps({name: timed(name) for name in MODELS}))
        return
    rows = {}
    for backend in ("tensorflow", "jax", "torch"):
        command = [sys.executable, __file__, "--child"]
        more = {"KERAS_BACKEND": backend, "TF_CPP_MIN_LOG_LEVEL": "3"}
        done = subprocess.run(command, env=os.environ | more, capture_output=True, text=True, check=True)
        rows[backend] = json.loads(done.stdout.splitlines()[-1])
    worst = max(row["ResNet50"]["fingerprint_s"] for row in rows.values())
    write_result("fingerprint", {"backends": rows, "limit_s": _LIMIT_S, "within_limit": worst < _LIMIT_S})


if __name__ == "__main__":
    main()
