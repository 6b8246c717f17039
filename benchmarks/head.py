"""A language model whose logits take most of the memory: pieces, recomputation, and the head in parts, side by side.

    python benchmarks/head.py                               CPU, a small model
    KERAS_BACKEND=torch python benchmarks/head.py --device gpu --policy mixed_bfloat16

Steps of all ways take turns, so that whatever else the machine does falls on all alike; times are medians. Peaks are
what a step takes beyond what is there before it: of TensorFlow's allocator, of XLA's own plan on JAX, and on torch of
the allocator of a GPU, or of the tensors alive on a CPU. Writes benchmarks/results/head-DEVICE-BACKEND.json.
"""

from __future__ import annotations

import argparse
import os
import statistics
import weakref
from typing import Any

parser = argparse.ArgumentParser()
parser.add_argument("--device", choices=["cpu", "gpu"], default="cpu")
parser.add_argument("--steps", type=int, default=7)
parser.add_argument("--policy", default="float32")
parser.add_argument("--sizes", help="layers,width,tokens,words,batch")
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
from keras import layers  # noqa: E402

import oomproof  # noqa: E402
from _common import write_result  # noqa: E402
from _steppers import Stepper, stepper_class  # noqa: E402

BACKEND = keras.backend.backend()
USUAL = "8,512,768,32000,16" if arguments.device == "gpu" else "4,256,128,16000,16"
DEPTH, WIDTH, TOKENS, WORDS, BATCH = map(int, (arguments.sizes or USUAL).split(","))
BLOCKS = tuple(f"before_{n}..sum_{n}" for n in range(DEPTH))
PLANS = {
    "plain Keras": None,
    "guarded, whole": oomproof.Plan(),
    "4 pieces": oomproof.Plan(micro_batch_size=BATCH // 4),
    "16 pieces": oomproof.Plan(micro_batch_size=BATCH // 16),
    "blocks recomputed": oomproof.Plan(recompute=BLOCKS),
    "head in 4": oomproof.Plan(head="last", head_parts=4),
    "head in 16": oomproof.Plan(head="last", head_parts=16),
    "head in 16, blocks recomputed": oomproof.Plan(head="last", head_parts=16, recompute=BLOCKS),
}


def gpt() -> Any:
    keras.utils.set_random_seed(1)
    inputs = keras.Input((TOKENS,), dtype="int32")
    x = layers.Embedding(WORDS, WIDTH, name="words")(inputs)
    for n in range(DEPTH):
        y = layers.LayerNormalization(name=f"before_{n}")(x)
        y = layers.MultiHeadAttention(WIDTH // 64, 64, name=f"attention_{n}")(y, y, use_causal_mask=True)
        x = layers.Add(name=f"attended_{n}")([x, y])
        y = layers.Dense(4 * WIDTH, "gelu", name=f"wide_{n}")(layers.LayerNormalization(name=f"middle_{n}")(x))
        x = layers.Add(name=f"sum_{n}")([x, layers.Dense(WIDTH, name=f"narrow_{n}")(y)])
    x = layers.LayerNormalization(name="last")(x)
    model = keras.Model(inputs, layers.Dense(WORDS, name="logits")(x))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    # Keras compiles with XLA on a GPU unless told otherwise; on TensorFlow that takes minutes.
    model.compile("adam", loss, metrics=["sparse_categorical_accuracy"], jit_compile=BACKEND == "jax")
    return model


def alive_at_most(stepper: Stepper) -> int:
    """Bytes of the tensors that a step of torch makes on a CPU, at the peak."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    class Watch(TorchDispatchMode):  # type: ignore[misc]
        seen: dict[int, int] = {}  # noqa: RUF012
        now = most = 0

        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            results = function(*args, **(kwargs or {}))
            for tensor in keras.tree.flatten(results):
                if isinstance(tensor, torch.Tensor):
                    self.note(tensor.untyped_storage())
            return results

        def note(self, storage: Any) -> None:
            key, size = storage._cdata, storage.nbytes()
            if key not in self.seen:
                self.seen[key] = size
                self.now += size
                self.most = max(self.most, self.now)
                weakref.finalize(storage, self.gone, key)

        def gone(self, key: int) -> None:
            self.now -= self.seen.pop(key, 0)

    stepper.model.zero_grad()
    watch = Watch()
    with watch:
        stepper.run()
    return watch.most


def main() -> None:
    keras.config.set_dtype_policy(arguments.policy)
    rng = np.random.default_rng(0)
    x = rng.integers(0, WORDS, (BATCH, TOKENS)).astype("int32")
    steppers: dict[str, Stepper] = {}
    for name, plan in PLANS.items():
        model = gpt()
        if plan is not None:
            oomproof.guard(model, plan=plan)
        steppers[name] = stepper_class()(model, x, np.roll(x, -1, 1), arguments.device)
    times: dict[str, list[float]] = {name: [] for name in steppers}
    for _ in range(arguments.steps):
        for name, stepper in steppers.items():
            times[name].append(stepper.step())
    on_cpu = BACKEND == "torch" and arguments.device == "cpu"
    peaks = {name: alive_at_most(stepper) if on_cpu else stepper.peak() for name, stepper in steppers.items()}
    seconds = {name: statistics.median(found) for name, found in times.items()}
    rows = {
        name: {
            "peak": peaks[name],
            "of plain peak": round(peaks[name] / peaks["plain Keras"], 3),
            "seconds": round(seconds[name], 4),
            "of plain time": round(seconds[name] / seconds["plain Keras"], 2),
        }
        for name in steppers
    }
    sizes = {"layers": DEPTH, "width": WIDTH, "tokens": TOKENS, "words": WORDS, "batch": BATCH}
    what = {"command": "python benchmarks/head.py", "policy": arguments.policy, "sizes": sizes}
    write_result(f"head-{arguments.device}-{BACKEND}", {**what, "rows": rows})


if __name__ == "__main__":
    main()
