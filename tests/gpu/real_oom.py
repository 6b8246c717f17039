"""Real out-of-memory errors on a GPU, by hand: python tests/gpu/real_oom.py [--cap 6000] [--out FILE]

Trains a conv net on the whole card, and on the same card capped far below what a step needs, with and without XLA.
Writes JSON: final weights against the uncapped run, events, peaks. Results are committed under tests/gpu/results.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from typing import Any


def child(cap: int, jit: bool, batch: int, weights: str) -> dict[str, Any]:
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    import keras
    import numpy as np
    import tensorflow as tf

    import oomproof

    gpu = tf.config.list_physical_devices("GPU")[0]
    if cap:
        limit = tf.config.LogicalDeviceConfiguration(memory_limit=cap)
        tf.config.set_logical_device_configuration(gpu, [limit])
    # Rounding of TensorFloat-32 would hide differences that matter.
    tf.config.experimental.enable_tensor_float_32_execution(False)
    keras.utils.set_random_seed(0)
    layers = [keras.Input((32, 32, 3))]
    for _ in range(6):
        layers += [keras.layers.Conv2D(128, 3, padding="same", activation="relu"), keras.layers.LayerNormalization()]
    model = keras.Sequential([*layers, keras.layers.GlobalAveragePooling2D(), keras.layers.Dense(10)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(1e-4), loss, metrics=["accuracy"], jit_compile=jit)
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(3 * batch, 32, 32, 3)).astype("float32"), rng.integers(0, 10, 3 * batch)
    seen: list[int] = []

    class Batches(keras.utils.PyDataset):
        def __len__(self) -> int:
            return 3

        def __getitem__(self, index: int) -> Any:
            seen.append(index)
            return x[index * batch : (index + 1) * batch], y[index * batch : (index + 1) * batch]

    oomproof.guard(model)
    began = time.perf_counter()
    history = model.fit(Batches(), epochs=2, shuffle=False, verbose=0)
    predictions = model.predict(x[:batch], batch_size=batch, verbose=0)
    np.savez(weights, *model.get_weights())
    return {
        "cap_mb": cap,
        "jit_compile": jit,
        "batch": batch,
        "seconds": time.perf_counter() - began,
        "loss": history.history["loss"],
        "iterations": int(model.optimizer.iterations),
        "batches_pulled": sorted(seen),
        "predictions_sum": float(predictions.sum()),
        "run": history.run.to_json(),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--caps", default="0,6000,3000")
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--out", default="tests/gpu/results/real_oom_tensorflow.json")
    parser.add_argument("--child", nargs=3, default=None)
    arguments = parser.parse_args()
    if arguments.child:
        cap, jit, weights = arguments.child
        print("RESULT " + json.dumps(child(int(cap), jit == "True", arguments.batch, weights)), flush=True)
        return
    import numpy as np

    out = pathlib.Path(arguments.out)
    out.parent.mkdir(parents=True, exist_ok=True)
    results = []
    with tempfile.TemporaryDirectory() as folder:
        for jit in (False, True):
            reference = None
            for cap in map(int, arguments.caps.split(",")):
                file = f"{folder}/weights-{cap}-{jit}.npz"
                command = [
                    sys.executable,
                    __file__,
                    "--batch",
                    str(arguments.batch),
                    "--child",
                    str(cap),
                    str(jit),
                    file,
                ]
                done = subprocess.run(command, capture_output=True, text=True, check=False)
                line = next((text for text in done.stdout.splitlines() if text.startswith("RESULT ")), None)
                if line is None:
                    results.append({"cap_mb": cap, "jit_compile": jit, "failed": done.stderr[-2000:]})
                    print(results[-1], flush=True)
                    continue
                result = json.loads(line.removeprefix("RESULT "))
                with np.load(file) as archive:
                    weights = [archive[name] for name in archive.files]
                if reference is None:
                    reference = weights
                pairs = zip(reference, weights, strict=True)
                result["largest_weight_difference"] = max(float(np.max(np.abs(a - b))) for a, b in pairs)
                results.append(result)
                print(json.dumps({k: v for k, v in result.items() if k != "run"}), flush=True)
                print("\n".join(event["message"] for event in result["run"]["events"]), flush=True)
                out.write_text(json.dumps(results, indent=2) + "\n")
    out.write_text(json.dumps(results, indent=2) + "\n")


main()
