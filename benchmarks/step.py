"""What a guarded step costs beside Keras's own, in time and memory, whole and in pieces, on the backend Keras runs on.

    python benchmarks/step.py                  CPU, TensorFlow's limited allocator so that peaks can be read
    KERAS_BACKEND=jax python benchmarks/step.py --device gpu --parts whole-conv,pieces-conv,pieces-transformer
    KERAS_BACKEND=jax python benchmarks/step.py --device gpu --parts recompute-transformer,recompute-residual --name …

Plain and guarded steps alternate, so that whatever else the machine does falls on both alike. Writes
benchmarks/results/step-DEVICE-BACKEND.json after each part, so that a run that is cut short leaves what it has.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Callable
from typing import Any

parser = argparse.ArgumentParser()
parser.add_argument("--device", choices=["cpu", "gpu"], default="cpu")
parser.add_argument("--steps", type=int, default=40)
parser.add_argument("--jit", choices=["auto", "yes", "no"], default="auto", help="jit_compile; auto is Keras's choice")
parser.add_argument("--parts", default="whole-conv,pieces-conv")
parser.add_argument("--pieces", default="1,4,16")
parser.add_argument("--shares", default="0.6,0.4,0.25", help="of the plain peak, for parts that recompute")
parser.add_argument("--name", default=None, help="name of the result; step-DEVICE-BACKEND otherwise")
arguments = parser.parse_args()
os.environ.setdefault("KERAS_BACKEND", "tensorflow")
if arguments.device == "cpu":
    os.environ |= {
        "TF_CPU_ALLOCATOR_USE_BFC": "true",
        "TF_CPU_BFC_MEM_LIMIT_IN_MB": "12000",
        "TF_ENABLE_ONEDNN_OPTS": "0",
    }
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras  # noqa: E402
import numpy as np  # noqa: E402

import oomproof  # noqa: E402
from _common import write_result  # noqa: E402
from _plan_zoo import tagger  # noqa: E402
from _steppers import Stepper, stepper_class  # noqa: E402

JIT: Any = {"auto": "auto", "yes": True, "no": False}[arguments.jit]
Workload = tuple[Callable[[], Any], Any, Any]


def conv(size: int, blocks: int, width: int, batch: int) -> Workload:
    """Convolutions and LayerNorm: no batch statistics, so pieces are exact."""

    def make() -> Any:
        layers = [keras.Input((size, size, 3))]
        for _ in range(blocks):
            layers += [
                keras.layers.Conv2D(width, 3, padding="same", activation="relu"),
                keras.layers.LayerNormalization(),
            ]
        return keras.Sequential([*layers, keras.layers.GlobalAveragePooling2D(), keras.layers.Dense(10)])

    rng = np.random.default_rng(0)
    return make, rng.normal(size=(batch, size, size, 3)).astype("float32"), rng.integers(0, 10, batch)


def transformer(depth: int, width: int, steps: int, batch: int, words: int = 1000) -> Workload:
    def make() -> Any:
        return tagger(depth, width, steps, words)

    rng = np.random.default_rng(0)
    return make, rng.integers(0, words, (batch, steps)), rng.integers(0, words, (batch, steps))


def residual(size: int, batch: int) -> Workload:
    def make() -> Any:
        return keras.applications.ResNet50(
            weights=None, input_shape=(size, size, 3), classes=10, classifier_activation=None
        )

    rng = np.random.default_rng(0)
    return make, rng.normal(size=(batch, size, size, 3)).astype("float32"), rng.integers(0, 10, batch)


def workload(name: str) -> Workload:
    if name == "residual":
        return residual(32, 16) if arguments.device == "cpu" else residual(224, 128)
    if arguments.device == "cpu":
        return conv(32, 4, 32, 64) if name == "conv" else transformer(2, 64, 64, 16)
    # About as large as the nets of the first measurements: 9.9 GB and 14.9 GB of activations with XLA.
    return conv(64, 6, 96, 512) if name == "conv" else transformer(6, 512, 512, 64)


def compiled(work: Workload) -> Any:
    # Names count from the beginning: a plan for one model is to fit the next.
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(0)
    model = work[0]()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss, metrics=["accuracy"], jit_compile=JIT)
    return model


def stepper(work: Workload, guarded: bool, pieces: int = 1, plan: oomproof.Plan | None = None) -> Stepper:
    _, x, y = work
    model = compiled(work)
    if guarded:
        # Where none is given an empty one: a step as it is, and no time spent on planning it.
        micro = "auto" if pieces == 1 else -(-len(x) // pieces)
        oomproof.guard(model, micro_batch_size=micro, plan=plan or oomproof.Plan())
    found = stepper_class()(model, x, y, arguments.device)
    print(f"first step: {found.first_step_seconds:.1f} s (guarded={guarded}, pieces={pieces})", flush=True)
    return found


def side_by_side(name: str) -> dict[str, Any]:
    """Everything fits: guarded / plain."""
    work = workload(name)
    plain, guarded = (stepper(work, guarded=g) for g in (False, True))
    for _ in range(3):
        plain.step(), guarded.step()
    pairs = [(plain.step(), guarded.step()) for _ in range(arguments.steps)]
    # Without waiting after each step, as fit runs when nobody looks at the numbers.
    fits = [(plain.fit(arguments.steps), guarded.fit(arguments.steps)) for _ in range(3)]
    gradients = sum(int(np.prod(v.shape)) * 4 for v in plain.model.trainable_variables)
    plain_peak, guarded_peak = plain.peak(), guarded.peak()
    return {
        "workload": name,
        "batch": len(work[1]),
        "jit_compile": bool(plain.model.jit_compile),
        "steps": len(pairs),
        "plain_ms": statistics.median(p for p, _ in pairs) * 1e3,
        "guarded_ms": statistics.median(g for _, g in pairs) * 1e3,
        "time_ratio": statistics.median(g for _, g in pairs) / statistics.median(p for p, _ in pairs),
        "paired_time_ratio": statistics.median(g / p for p, g in pairs),
        "fit_plain_ms": statistics.median(p for p, _ in fits) * 1e3,
        "fit_guarded_ms": statistics.median(g for _, g in fits) * 1e3,
        "fit_ratio": statistics.median(g for _, g in fits) / statistics.median(p for p, _ in fits),
        "plain_peak": plain_peak,
        "guarded_peak": guarded_peak,
        "one_set_of_gradients": gradients,
        "peak_within_plain_plus_gradients": guarded_peak <= plain_peak + gradients,
        "first_step_seconds": {"plain": plain.first_step_seconds, "guarded": guarded.first_step_seconds},
    }


def in_pieces(name: str, counts: list[int]) -> dict[str, Any]:
    """The same batch whole and in pieces: peak against fixed + slope × piece, time against whole."""
    work = workload(name)
    batch = len(work[1])
    whole = stepper(work, guarded=True)
    rows = []
    for count in counts:
        split = stepper(work, guarded=True, pieces=count) if count > 1 else whole
        for _ in range(3):
            whole.step(), split.step()
        pairs = [(whole.step(), split.step()) for _ in range(max(10, arguments.steps // 3))]
        rows.append(
            {
                "pieces": count,
                "micro": -(-batch // count),
                "peak": split.peak(),
                "ms": statistics.median(s for _, s in pairs) * 1e3,
                "time_vs_whole": statistics.median(s for _, s in pairs) / statistics.median(w for w, _ in pairs),
                "first_step_seconds": split.first_step_seconds,
            }
        )
        print("   ", rows[-1], flush=True)
        if count > 1:
            split.close()
    split_rows = [row for row in rows if row["pieces"] > 1]
    found = {"workload": name, "batch": batch, "jit_compile": bool(whole.model.jit_compile), "rows": rows}
    if len(split_rows) > 2:
        slope, fixed = np.polyfit([r["micro"] for r in split_rows], [r["peak"] for r in split_rows], 1)
        for row in split_rows:
            row["off_the_line"] = row["peak"] / (fixed + slope * row["micro"]) - 1
        found |= {"fixed": fixed, "slope": slope, "largest_deviation": max(abs(r["off_the_line"]) for r in split_rows)}
    return found


def recomputing(name: str, shares: list[float]) -> dict[str, Any]:
    """Plain Keras beside plans that may only recompute, for parts of what the plain step is estimated to take."""
    work = workload(name)
    batch = len(work[1])
    plain = stepper(work, guarded=False)
    whole = plain.peak()
    planned = compiled(work)
    estimated = oomproof.estimate(planned, batch, memory="1024GiB", engine="trace").expected
    rows: list[dict[str, Any]] = []
    for share in shares:
        row: dict[str, Any] = {"share": share}
        rows.append(row)
        plan = None
        # Cutting the batch comes in where recomputing alone is not enough.
        for allow in ({"recompute"}, {"recompute", "microbatch"}):
            row["allow"] = sorted(allow)
            try:
                plan = oomproof.plan(planned, batch, budget=int(estimated * share), allow=allow, cache=False)
                break
            except oomproof.CannotFitError as error:
                row["cannot_fit"] = str(error).splitlines()[0]
        if plan is None:
            continue
        other = stepper(work, guarded=True, plan=plan)
        for _ in range(3):
            plain.step(), other.step()
        pairs = [(plain.step(), other.step()) for _ in range(max(10, arguments.steps // 3))]
        row |= {
            "plan": plan.sentence,
            "recomputed": plan.recomputed,
            "segments": plan.segments,
            "recompute": plan.recompute,
            "predicted_time": plan.relative_time,
            "predicted_peak_over_plain": (plan.predicted or 0) / estimated,
            "peak": other.peak(),
            "times_less_memory": whole / max(1, other.peak()),
            "ms": statistics.median(o for _, o in pairs) * 1e3,
            "time_vs_plain": statistics.median(o for _, o in pairs) / statistics.median(p for p, _ in pairs),
            "first_step_seconds": other.first_step_seconds,
        }
        print("   ", row, flush=True)
        other.close()
    return {"workload": name, "batch": batch, "plain_peak": whole, "estimated": estimated, "rows": rows}


def main() -> None:
    backend = keras.backend.backend()
    result: dict[str, Any] = {"backend": backend, "peak_is": stepper_class().peak_is, "whole": [], "pieces": []}
    result["recompute"] = []
    for part in arguments.parts.split(","):
        what, name = part.split("-")
        if what == "whole":
            result["whole"].append(side_by_side(name))
            print(result["whole"][-1], flush=True)
        elif what == "recompute":
            result["recompute"].append(recomputing(name, [float(share) for share in arguments.shares.split(",")]))
        else:
            result["pieces"].append(in_pieces(name, [int(count) for count in arguments.pieces.split(",")]))
        write_result(arguments.name or f"step-{arguments.device}-{backend}", result)
        keras.utils.clear_session(free_memory=True)


main()
