"""What a guarded step costs beside Keras's own, in time and memory, whole and in pieces.

    python benchmarks/step.py                  CPU: graph mode, TensorFlow's limited allocator so that peaks can be read
    python benchmarks/step.py --device gpu     GPU: graph mode and XLA, the sizes that docs/step.md quotes

Plain and guarded steps alternate, so that whatever else the machine does falls on both alike. Writes
benchmarks/results/step-DEVICE.json.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

parser = argparse.ArgumentParser()
parser.add_argument("--device", choices=["cpu", "gpu"], default="cpu")
parser.add_argument("--steps", type=int, default=40)
parser.add_argument("--parts", default="whole-graph,whole-xla,pieces-graph,pieces-xla", help="what to run, GPU only")
arguments = parser.parse_args()
if arguments.device == "cpu":
    os.environ |= {
        "TF_CPU_ALLOCATOR_USE_BFC": "true",
        "TF_CPU_BFC_MEM_LIMIT_IN_MB": "12000",
        "TF_ENABLE_ONEDNN_OPTS": "0",
    }
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras  # noqa: E402
import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402

import oomproof  # noqa: E402
from _common import write_result  # noqa: E402

Make = Callable[[], Any]
Shape = tuple[int, ...]
DEVICE = "GPU:0" if arguments.device == "gpu" else "CPU:0"


def conv_net(size: int, blocks: int, width: int) -> keras.Model:
    """Convolutions and LayerNorm: no batch statistics, so pieces are exact."""
    keras.utils.set_random_seed(0)
    layers = [keras.Input((size, size, 3))]
    for _ in range(blocks):
        layers += [keras.layers.Conv2D(width, 3, padding="same", activation="relu"), keras.layers.LayerNormalization()]
    return keras.Sequential([*layers, keras.layers.GlobalAveragePooling2D(), keras.layers.Dense(10)])


def compiled(make: Make, jit: bool) -> keras.Model:
    model = make()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss, metrics=["accuracy"], jit_compile=jit)
    return model


class Stepper:
    """One model and its own endless iterator; `step()` runs one logical batch the way `fit` does."""

    def __init__(self, make: Make, batch: int, shape: Shape, jit: bool, guarded: bool, pieces: int = 1) -> None:
        self.model = compiled(make, jit)
        if guarded:
            oomproof.guard(self.model, micro_batch_size="auto" if pieces == 1 else -(-batch // pieces))
        rng = np.random.default_rng(0)
        x, y = rng.normal(size=(batch, *shape)).astype("float32"), rng.integers(0, 10, batch)
        dataset = tf.data.Dataset.from_tensors((x, y)).repeat()
        began = time.perf_counter()
        self.model.fit(dataset, steps_per_epoch=1, verbose=0)
        self.first_step_seconds = time.perf_counter() - began
        print(
            f"first step: {self.first_step_seconds:.1f} s (guarded={guarded}, jit={jit}, pieces={pieces})", flush=True
        )
        self.iterator = iter(dataset)

    def step(self) -> float:
        began = time.perf_counter()
        logs = self.model.train_function(self.iterator)
        float(logs["loss"])  # Waits for the device.
        return time.perf_counter() - began

    def peak(self) -> int:
        tf.config.experimental.reset_memory_stats(DEVICE)
        before = tf.config.experimental.get_memory_info(DEVICE)["current"]
        self.step()
        return int(tf.config.experimental.get_memory_info(DEVICE)["peak"] - before)


def side_by_side(make: Make, batch: int, shape: Shape, jit: bool) -> dict[str, Any]:
    """Everything fits: guarded / plain."""
    plain, guarded = (Stepper(make, batch, shape, jit, guarded=g) for g in (False, True))
    for _ in range(3):
        plain.step(), guarded.step()
    pairs = [(plain.step(), guarded.step()) for _ in range(arguments.steps)]
    gradients = sum(int(np.prod(v.shape)) * 4 for v in plain.model.trainable_variables)
    plain_peak, guarded_peak = (max(s.peak() for _ in range(3)) for s in (plain, guarded))
    return {
        "batch": batch,
        "jit_compile": jit,
        "steps": len(pairs),
        "plain_ms": statistics.median(p for p, _ in pairs) * 1e3,
        "guarded_ms": statistics.median(g for _, g in pairs) * 1e3,
        "time_ratio": statistics.median(g for _, g in pairs) / statistics.median(p for p, _ in pairs),
        "paired_time_ratio": statistics.median(g / p for p, g in pairs),
        "plain_peak": plain_peak,
        "guarded_peak": guarded_peak,
        "one_set_of_gradients": gradients,
        "peak_within_plain_plus_gradients": guarded_peak <= plain_peak + gradients,
        "first_step_seconds": {"plain": plain.first_step_seconds, "guarded": guarded.first_step_seconds},
    }


def in_pieces(make: Make, batch: int, shape: Shape, jit: bool, counts: list[int]) -> dict[str, Any]:
    """The same batch whole and in pieces: peak against fixed + slope × piece, time against whole."""
    whole = Stepper(make, batch, shape, jit, guarded=True)
    rows = []
    for count in counts:
        split = Stepper(make, batch, shape, jit, guarded=True, pieces=count) if count > 1 else whole
        for _ in range(3):
            whole.step(), split.step()
        pairs = [(whole.step(), split.step()) for _ in range(max(10, arguments.steps // 3))]
        rows.append(
            {
                "pieces": count,
                "micro": -(-batch // count),
                "peak": statistics.median(split.peak() for _ in range(5)),
                "ms": statistics.median(s for _, s in pairs) * 1e3,
                "time_vs_whole": statistics.median(s for _, s in pairs) / statistics.median(w for w, _ in pairs),
                "first_step_seconds": split.first_step_seconds,
            }
        )
        print("   ", rows[-1], flush=True)
    split_rows = [row for row in rows if row["pieces"] > 1]
    slope, fixed = np.polyfit([r["micro"] for r in split_rows], [r["peak"] for r in split_rows], 1)
    for row in split_rows:
        row["off_the_line"] = row["peak"] / (fixed + slope * row["micro"]) - 1
    return {
        "batch": batch,
        "jit_compile": jit,
        "rows": rows,
        "fixed": fixed,
        "slope": slope,
        "largest_deviation": max(abs(row["off_the_line"]) for row in split_rows),
    }


def main() -> None:
    result: dict[str, Any] = {"whole": [], "pieces": []}

    def save() -> None:
        write_result(f"step-{arguments.device}", result)

    if arguments.device == "cpu":
        result["whole"].append(side_by_side(lambda: conv_net(32, 4, 32), 64, (32, 32, 3), jit=False))
        print(result["whole"][-1], flush=True)
        result["pieces"].append(in_pieces(lambda: conv_net(32, 4, 32), 256, (32, 32, 3), False, [1, 2, 4, 8, 16, 32]))
    else:
        # XLA's first compile of a convolution takes minutes with some versions of cuDNN, so it comes last.
        for part in arguments.parts.split(","):
            what, mode = part.split("-")
            net, shape, jit = (lambda: conv_net(32, 6, 128)), (32, 32, 3), mode == "xla"
            if what == "whole":
                result["whole"].append(side_by_side(net, 512, shape, jit))
                print(result["whole"][-1], flush=True)
            else:
                counts = [1, 4, 16] if jit else [1, 2, 4, 8, 16, 32]
                result["pieces"].append(in_pieces(net, 512, shape, jit, counts))
            save()
    save()


main()
