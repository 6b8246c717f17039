"""Estimates against the few peaks that were measured on a GPU for other benchmarks (results/step-gpu-*.json).

    python benchmarks/estimate_known.py

No GPU is needed. The nets are those of step.py; its peaks are what a step takes beyond what is in use before it, so
weights and slots are left out of the estimates too. Six figures are no score: benchmarks/estimate is for that. Engine
"compile" is asked where the extra `gpu-compile` is installed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

from _common import RESULTS, write_result

GPU = "h200"


def known() -> Iterator[dict[str, Any]]:
    """Every whole step of plain Keras that was measured, with the net it was measured on."""
    for stack, file in (("jax", "step-gpu-jax"), ("torch", "step-gpu-torch"), ("tensorflow", "step-gpu-whole")):
        for row in json.loads((RESULTS / f"{file}.json").read_text())["whole"]:
            # TensorFlow's conv net was a smaller one: images of 32 × 32, 128 channels.
            size = (32, 128) if stack == "tensorflow" else (64, 96)
            yield {
                "backend": stack,
                "net": row.get("workload", "conv"),
                "size": size,
                "batch": row["batch"],
                "jit": row["jit_compile"],
                "measured": row["plain_peak"],
                "from": f"{file}.json",
            }


def net(case: dict[str, Any]) -> Any:
    import keras
    from keras import layers

    if case["net"] == "conv":
        size, width = case["size"]
        stack = [keras.Input((size, size, 3))]
        for _ in range(6):
            stack += [layers.Conv2D(width, 3, padding="same", activation="relu"), layers.LayerNormalization()]
        model = keras.Sequential([*stack, layers.GlobalAveragePooling2D(), layers.Dense(10)])
    else:
        x = inputs = keras.Input((512,), dtype="int32")
        x = layers.Embedding(1000, 512)(x)
        for _ in range(6):
            attention = layers.MultiHeadAttention(8, 64)
            x = layers.LayerNormalization()(layers.Add()([x, attention(x, x)]))
            hidden = layers.Dense(512)(layers.Dense(2048, activation="gelu")(x))
            x = layers.LayerNormalization()(layers.Add()([x, hidden]))
        model = keras.Model(inputs, layers.Dense(1000)(x))
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def estimated(case: dict[str, Any]) -> Iterator[dict[str, Any]]:
    import oomproof

    model = net(case)
    for engine in ("trace", "compile"):
        try:
            found = oomproof.estimate(model, case["batch"], gpu=GPU, engine=engine, jit=case["jit"])
        except oomproof.BackendError:
            continue
        before = found.by_category.get("weights", 0) + found.by_category.get("optimizer", 0)
        low, expected, high = (size - before for size in (found.low, found.expected, found.high))
        yield {
            **case,
            "engine": engine,
            "low": low,
            "expected": expected,
            "high": high,
            "error": expected / case["measured"] - 1,
            "inside": low <= case["measured"] <= high,
            "seconds": found.seconds,
        }


def main() -> None:
    if len(sys.argv) > 1:
        print(json.dumps(list(estimated(json.loads(sys.argv[1])))))
        return
    rows = []
    for case in known():
        quiet = {"KERAS_BACKEND": case["backend"], "TF_CPP_MIN_LOG_LEVEL": "3", "JAX_PLATFORMS": "cpu"}
        command = [sys.executable, __file__, json.dumps(case)]
        done = subprocess.run(command, env=os.environ | quiet, capture_output=True, text=True, check=True)
        rows += json.loads(done.stdout.splitlines()[-1])
    write_result("estimate-known", {"gpu": GPU, "rows": rows})


if __name__ == "__main__":
    main()
