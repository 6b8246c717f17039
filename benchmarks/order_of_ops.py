"""What the order of ops does to the peak of a step in graph mode: TensorFlow's own executor beside one of one thread.

    python benchmarks/order_of_ops.py --seed 7701 --numbers 4,13,6

TensorFlow's threads run ops side by side, in another order each time. With one thread the order is always the same; the
memory optimizer of Grappler has to be off, since it makes temporary variables that this executor does not know. On the
CPU's BFC allocator, a few samples of the models of `unseen.py`; each model in a process of its own.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

_SETTINGS = {
    "TF_CPU_ALLOCATOR_USE_BFC": "true",
    "TF_CPU_BFC_MEM_LIMIT_IN_MB": "12000",
    "TF_ENABLE_ONEDNN_OPTS": "0",
    "KERAS_BACKEND": "tensorflow",
    "TF_CPP_MIN_LOG_LEVEL": "3",
}
_STEPS = 7


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=7701)
    parser.add_argument("--numbers", default=",".join(map(str, range(20))))
    parser.add_argument("--part", type=int, default=5, help="of the batch that a GPU would take: one of so many")
    parser.add_argument("--child", type=int)
    chosen = parser.parse_args()
    if chosen.child is not None:
        print(json.dumps(measured(chosen.seed, chosen.child, chosen.part)))
        return
    rows = []
    for number in chosen.numbers.split(","):
        command = [sys.executable, __file__, "--seed", str(chosen.seed), "--part", str(chosen.part), "--child", number]
        answer = subprocess.run(command, env={**os.environ, **_SETTINGS}, capture_output=True, text=True, timeout=600)
        lines = answer.stdout.strip().splitlines()
        rows.append(json.loads(lines[-1]) if lines else {"number": number, "error": answer.stderr[-200:]})
        print(rows[-1], flush=True)
    from _common import write_result

    done = [row for row in rows if "error" not in row]
    ratios = sorted(max(row["one_thread"]["peaks"]) / max(row["default"]["peaks"]) for row in done)
    times = sorted(row["one_thread"]["seconds"] / row["default"]["seconds"] for row in done)
    summary = {"median_of_largest_peaks": ratios[len(ratios) // 2], "median_of_times": times[len(times) // 2]}
    write_result("order-of-ops", {**summary, "rows": rows})


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    from tensorflow.core.protobuf import config_pb2, rewriter_config_pb2
    from tensorflow.python.eager import context

    here = context.context()
    before, config = here.function_call_options, config_pb2.ConfigProto()
    config.CopyFrom(here.config)
    config.graph_options.rewrite_options.memory_optimization = rewriter_config_pb2.RewriterConfig.NO_MEM_OPT
    here.function_call_options = context.FunctionCallOptions("SINGLE_THREADED_EXECUTOR", config)
    try:
        yield
    finally:
        here.function_call_options = before


def measured(seed: int, number: int, part: int) -> dict[str, Any]:
    import keras
    import numpy as np
    import tensorflow as tf

    from _grammar import case

    keras.utils.set_random_seed(1)
    made = case(seed, number, "gpu")
    model, batch, rng = made.model, max(2, made.batch // part), np.random.default_rng(0)

    def drawn(like: Any, least: int) -> Any:
        several = [
            tf.constant(
                rng.integers(least, most, (batch, *shape)).astype(dtype)
                if most
                else rng.normal(size=(batch, *shape)).astype(dtype)
            )
            for shape, dtype, most in like
        ]
        return several[0] if len(several) == 1 else tuple(several)

    x, y = drawn(made.data, 1), drawn(made.targets or [((1,), "int64", made.classes)], 0)
    model.optimizer.build(model.trainable_variables)

    def step() -> Any:
        with tf.GradientTape() as tape:
            loss = model.compute_loss(x, y, model(x, training=True))
        gradients = tape.gradient(loss, [variable._value for variable in model.trainable_variables])
        model.optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    found: dict[str, Any] = {"number": number, "model": model.name, "batch": batch}
    for name, way in (("default", contextlib.nullcontext), ("one_thread", one_thread)):
        run, peaks, seconds = tf.function(step, autograph=False), [], []
        with way():
            for _ in range(_STEPS):
                tf.config.experimental.reset_memory_stats("CPU:0")
                began = time.perf_counter()
                run().numpy()
                seconds.append(time.perf_counter() - began)
                peaks.append(tf.config.experimental.get_memory_info("CPU:0")["peak"] >> 20)
        found[name] = {"peaks": peaks, "seconds": sorted(seconds)[_STEPS // 3]}
    return found


if __name__ == "__main__":
    main()
