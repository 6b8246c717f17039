"""What single calls cost however small they are: losses, metrics and layers on one sample and on many.

    KERAS_BACKEND=torch python benchmarks/constants.py --device gpu
    python benchmarks/constants.py --tokens 64 --words 2000        CPU

A call that takes as long for one sample as for sixteen costs each piece of a batch the same again. Losses and layers
are timed forward and back, metrics forward; on PyTorch losses once more with the kernels of a guarded step. Times are
medians of calls that are waited for. Writes benchmarks/results/constants-DEVICE-BACKEND.json.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

parser = argparse.ArgumentParser()
parser.add_argument("--device", choices=["cpu", "gpu"], default="cpu")
parser.add_argument("--tokens", type=int, default=768)
parser.add_argument("--words", type=int, default=32_000)
parser.add_argument("--width", type=int, default=512)
parser.add_argument("--samples", default="1,16")
parser.add_argument("--times", type=int, default=7)
arguments = parser.parse_args()
os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras  # noqa: E402
import numpy as np  # noqa: E402
from keras import layers, losses, metrics  # noqa: E402

from _common import write_result  # noqa: E402

BACKEND = keras.backend.backend()
TOKENS, WORDS, WIDTH = arguments.tokens, arguments.words, arguments.width
Function = Callable[[Any], Any]


def differentiated(function: Function) -> Function:
    """Forward and back by the input, as each backend does it; waited for."""
    if BACKEND == "torch":
        import torch

        def run(x: Any) -> Any:
            x = x.detach().requires_grad_()
            function(x).sum().backward()
            return x.grad

        def waited(x: Any) -> None:
            run(x)
            if arguments.device == "gpu":
                torch.cuda.synchronize()

        return waited
    if BACKEND == "jax":
        import jax

        compiled = jax.jit(jax.value_and_grad(lambda x: function(x).sum()))
        return lambda x: jax.block_until_ready(compiled(x))
    import tensorflow as tf

    def both(x: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            value = tf.reduce_sum(function(x))
        return value, tape.gradient(value, x)

    traced = tf.function(both, autograph=False)
    return lambda x: float(traced(x)[0])


def waited(function: Function) -> Function:
    def run(x: Any) -> None:
        np.asarray(keras.ops.convert_to_numpy(function(x)))

    return run


def seconds(run: Function, x: Any) -> float:
    run(x)
    run(x)
    found = []
    for _ in range(arguments.times):
        began = time.perf_counter()
        run(x)
        found.append(time.perf_counter() - began)
    return statistics.median(found)


def calls(samples: int) -> dict[str, tuple[Callable[[], Function], Any]]:
    """Name: (makes the call, what it is called on)."""
    rng = np.random.default_rng(0)

    def tensor(*shape: int) -> Any:
        return keras.ops.convert_to_tensor(rng.normal(size=(samples, *shape)).astype("float32"))

    words = keras.ops.convert_to_tensor(rng.integers(0, WORDS, (samples, TOKENS)).astype("int32"))
    classes = keras.ops.convert_to_tensor(rng.integers(0, 1000, samples).astype("int32"))
    logits, scores, states, images = tensor(TOKENS, WORDS), tensor(1000), tensor(TOKENS, WIDTH), tensor(56, 56, 64)
    sparse = losses.SparseCategoricalCrossentropy(from_logits=True)
    softmaxed = losses.SparseCategoricalCrossentropy()
    accuracy, top = metrics.SparseCategoricalAccuracy(), metrics.SparseTopKCategoricalAccuracy()

    def layer(made: Any) -> Callable[[], Function]:
        return lambda: differentiated(lambda x: made(x, training=True))

    def metric(one: Any) -> Callable[[], Function]:
        return lambda: waited(lambda x: one(words, x))

    attention = layers.MultiHeadAttention(WIDTH // 64, 64)
    return {
        "sparse cross entropy, words": (lambda: differentiated(lambda x: sparse(words, x)), logits),
        "sparse cross entropy of probabilities, words": (
            lambda: differentiated(lambda x: softmaxed(words, keras.ops.softmax(x))),
            logits,
        ),
        "sparse cross entropy, classes": (lambda: differentiated(lambda x: sparse(classes, x)), scores),
        "mean squared error": (lambda: differentiated(lambda x: losses.MeanSquaredError()(x * 0.0, x)), states),
        "sparse accuracy, words": (metric(accuracy), logits),
        "sparse top 5, words": (metric(top), logits),
        "logits": (layer(layers.Dense(WORDS)), states),
        "layer normalization": (layer(layers.LayerNormalization()), states),
        "attention": (lambda: differentiated(lambda x: attention(x, x, use_causal_mask=True)), states),
        "gelu": (layer(layers.Dense(4 * WIDTH, "gelu")), states),
        "convolution": (layer(layers.Conv2D(64, 3, padding="same")), images),
        "batch normalization": (layer(layers.BatchNormalization()), images),
        "max pooling": (layer(layers.MaxPooling2D()), images),
    }


def guarded() -> contextlib.AbstractContextManager[None]:
    if BACKEND != "torch":
        return contextlib.nullcontext()
    from oomproof._backends.torch.kernels import faster_kernels

    return faster_kernels()


def main() -> None:
    sizes = [int(size) for size in arguments.samples.split(",")]
    rows: dict[str, dict[str, float]] = {}
    for samples in sizes:
        for name, (make, x) in calls(samples).items():
            row = rows.setdefault(name, {})
            row[f"{samples} samples"] = round(seconds(make(), x), 6)
            if BACKEND == "torch" and "entropy" in name:
                with guarded():
                    row[f"{samples} samples, guarded"] = round(seconds(make(), x), 6)
            print(name, row, flush=True)
    for row in rows.values():
        row["of the largest"] = round(row[f"{sizes[0]} samples"] / row[f"{sizes[-1]} samples"], 3)
    shape = {"tokens": TOKENS, "words": WORDS, "width": WIDTH, "samples": sizes}
    write_result(f"constants-{arguments.device}-{BACKEND}", {"sizes": shape, "seconds": rows})


if __name__ == "__main__":
    main()
