"""The trace of a JAX step against XLA's own account: the same step compiled for a GPU that is not there.

    python benchmarks/estimate_jax_compile.py [part of a case's name]

Needs the `gpu-compile` extra. Every case runs in a process of its own; nothing is trained.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from _common import write_result

CAPABILITY = (9, 0)
# An H200's: large enough that XLA does not start to recompute.
MEMORY = 150 * 10**9
FLOAT, HALF = "float32", "mixed_bfloat16"
# Name, batch size, policies, optimizers.
CASES: tuple[tuple[str, int, tuple[str, ...], tuple[str, ...]], ...] = (
    ("cnn", 64, (FLOAT, HALF), ("adam",)),
    ("transformer", 8, (FLOAT, HALF), ("adam", "sgd")),
    ("resnet50", 32, (FLOAT, HALF), ("adam",)),
    ("resnet50", 64, (FLOAT,), ("sgd",)),
    ("lstm", 64, (FLOAT,), ("adam",)),
    ("gru", 64, (FLOAT, HALF), ("adam",)),
    ("mlp", 1024, (FLOAT, HALF), ("adam", "sgd")),
    ("unet", 16, (FLOAT, HALF), ("adam",)),
    ("decoder", 16, (FLOAT, HALF), ("adam",)),
    ("vit", 16, (FLOAT, HALF), ("adam",)),
    ("multi_input", 128, (FLOAT, HALF), ("adam",)),
    ("generator", 64, (FLOAT,), ("adam",)),
    ("text_cnn", 128, (FLOAT,), ("adam",)),
    ("mobilenet_v2", 32, (FLOAT,), ("adam",)),
    ("vgg16", 16, (FLOAT,), ("adam",)),
    ("efficientnet_b0", 32, (FLOAT,), ("adam",)),
    ("densenet121", 16, (FLOAT,), ("adam",)),
    ("convnext_tiny", 16, (FLOAT,), ("adam",)),
    ("resnet50", 128, (FLOAT,), ("sgd",)),
    ("transformer", 32, (FLOAT,), ("sgd",)),
)


def block(x: Any, width: int, heads: int, causal: bool = False) -> Any:
    from keras import layers

    h = layers.LayerNormalization()(x)
    h = layers.MultiHeadAttention(heads, width // heads, dropout=0.1)(h, h, use_causal_mask=causal)
    x = layers.Add()([x, layers.Dropout(0.1)(h)])
    h = layers.LayerNormalization()(x)
    h = layers.Dense(width)(layers.Dense(4 * width, activation="gelu")(h))
    return layers.Add()([x, layers.Dropout(0.1)(h)])


def transformer(depth: int = 6, width: int = 512, steps: int = 512, words: int = 8000, causal: bool = False) -> Any:
    import keras
    from keras import layers

    tokens = keras.Input((steps,), dtype="int32")
    x = layers.Embedding(words, width)(tokens)
    for _ in range(depth):
        x = block(x, width, 8, causal)
    x = layers.LayerNormalization()(x)
    x = x if causal else layers.GlobalAveragePooling1D()(x)
    return keras.Model(tokens, layers.Dense(words if causal else 10, dtype="float32")(x))


def vit(depth: int = 8, width: int = 384, patch: int = 16) -> Any:
    import keras
    from keras import layers

    image = keras.Input((224, 224, 3))
    x = layers.Reshape((196, width))(layers.Conv2D(width, patch, strides=patch)(image))
    for _ in range(depth):
        x = block(x, width, 6)
    return keras.Model(image, layers.Dense(1000, dtype="float32")(layers.GlobalAveragePooling1D()(x)))


def application(name: str) -> Any:
    import keras

    return getattr(keras.applications, name)(weights=None, classifier_activation=None)


def cnn() -> Any:
    import keras
    from keras import layers

    x = image = keras.Input((128, 128, 3))
    for filters in (32, 64, 128, 256):
        for _ in range(2):
            x = layers.Conv2D(filters, 3, padding="same", activation="relu")(x)
        x = layers.MaxPooling2D()(x)
    x = layers.Dropout(0.5)(layers.Dense(512, activation="relu")(layers.Flatten()(x)))
    return keras.Model(image, layers.Dense(10, dtype="float32")(x))


def unet() -> Any:
    import keras
    from keras import layers

    def twice(x: Any, filters: int) -> Any:
        for _ in range(2):
            x = layers.Conv2D(filters, 3, padding="same", use_bias=False)(x)
            x = layers.ReLU()(layers.BatchNormalization()(x))
        return x

    x = image = keras.Input((128, 128, 3))
    skips = []
    for filters in (32, 64, 128):
        x = twice(x, filters)
        skips.append(x)
        x = layers.MaxPooling2D()(x)
    x = twice(x, 256)
    for filters, skip in zip((128, 64, 32), reversed(skips), strict=True):
        x = twice(layers.Concatenate()([layers.UpSampling2D()(x), skip]), filters)
    return keras.Model(image, layers.Conv2D(1, 1, dtype="float32")(x))


def generator() -> Any:
    import keras
    from keras import layers

    noise = keras.Input((128,))
    x = layers.Reshape((8, 8, 256))(layers.Dense(8 * 8 * 256)(noise))
    for filters in (256, 128, 64, 32):
        x = layers.Conv2DTranspose(filters, 4, strides=2, padding="same", use_bias=False)(x)
        x = layers.LeakyReLU()(layers.BatchNormalization()(x))
    return keras.Model(noise, layers.Conv2D(3, 3, padding="same", activation="tanh", dtype="float32")(x))


def recurrent(kind: str) -> Any:
    import keras
    from keras import layers

    tokens = keras.Input((128,), dtype="int32")
    x = layers.Embedding(10000, 256)(tokens)
    x = getattr(layers, kind)(512, return_sequences=True)(x)
    x = getattr(layers, kind)(512)(x)
    return keras.Model(tokens, layers.Dense(10, dtype="float32")(x))


def mlp() -> Any:
    import keras
    from keras import layers

    tokens = keras.Input((64,), dtype="int32")
    x = layers.Flatten()(layers.Embedding(100000, 64)(tokens))
    for _ in range(3):
        x = layers.Dropout(0.2)(layers.Dense(1024, activation="relu")(x))
    return keras.Model(tokens, layers.Dense(10, dtype="float32")(x))


def multi_input() -> Any:
    import keras
    from keras import layers

    x = image = keras.Input((64, 64, 3))
    numbers = keras.Input((100,))
    for filters in (32, 64):
        x = layers.Conv2D(filters, 3, padding="same", activation="swish")(x)
        x = layers.AveragePooling2D(2)(layers.BatchNormalization()(x))
    x = layers.Concatenate()([layers.Flatten()(x), layers.Dense(256, activation="relu")(numbers)])
    x = layers.Dense(256, activation="gelu")(x)
    return keras.Model([image, numbers], layers.Dense(10, dtype="float32")(x))


def text_cnn() -> Any:
    import keras
    from keras import layers

    tokens = keras.Input((256,), dtype="int32")
    x = layers.Embedding(20000, 128)(tokens)
    pooled = [layers.GlobalMaxPooling1D()(layers.Conv1D(128, size, activation="relu")(x)) for size in (3, 4, 5)]
    return keras.Model(tokens, layers.Dense(5, dtype="float32")(layers.Concatenate()(pooled)))


MODELS: dict[str, Callable[[], Any]] = {
    "cnn": cnn,
    "unet": unet,
    "generator": generator,
    "transformer": transformer,
    "decoder": lambda: transformer(4, 256, 256, causal=True),
    "vit": vit,
    "lstm": lambda: recurrent("LSTM"),
    "gru": lambda: recurrent("GRU"),
    "mlp": mlp,
    "multi_input": multi_input,
    "text_cnn": text_cnn,
    "resnet50": lambda: application("ResNet50"),
    "mobilenet_v2": lambda: application("MobileNetV2"),
    "efficientnet_b0": lambda: application("EfficientNetB0"),
    "densenet121": lambda: application("DenseNet121"),
    "convnext_tiny": lambda: application("ConvNeXtTiny"),
    "vgg16": lambda: application("VGG16"),
}


def figures(name: str, batch: int, policy: str, optimizer: str) -> dict[str, Any]:
    """Both engines on one case, in this process."""
    os.environ |= {"KERAS_BACKEND": "jax", "JAX_PLATFORMS": "cpu"}
    import keras

    from oomproof._estimation.allocator import replay
    from oomproof._records.trace import Spec, Target, Workload
    from oomproof._simulators.jax.compile import compile_step
    from oomproof._simulators.jax.trace import trace

    keras.config.set_dtype_policy(policy)
    model = MODELS[name]()
    classes = len(model.output.shape) != 4
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True) if classes else keras.losses.MeanSquaredError()
    model.compile(optimizer, loss)
    x = [Spec((batch, *tensor.shape[1:]), str(tensor.dtype)) for tensor in model.inputs]
    shape = model.output.shape[1:-1] if classes else model.output.shape[1:]
    y = Spec((batch, *shape), "int32" if classes else "float32")
    workload = Workload(x if len(x) > 1 else x[0], y, "train", True, Target(True, CAPABILITY))
    start = time.perf_counter()
    traced = trace(model, workload)
    # A program that is compiled without its GPU has no workspaces.
    known = dataclasses.replace(traced, buffers=tuple(b for b in traced.buffers if not b.workspace))
    replayed = replay(known)
    traced_s, traced_mib = time.perf_counter() - start, resident()
    compiled = compile_step(model, workload, MEMORY)
    live = sum(buffer.size for buffer in replayed.live)
    return {
        "case": f"{name} {batch} {policy} {optimizer}",
        "arguments": compiled.arguments,
        "temporary": compiled.temporary,
        "compiled_peak": compiled.peak,
        "workspaces_expected": replay(traced).peak - replayed.peak,
        "traced_peak": replayed.peak,
        "error_percent": round(100 * (replayed.peak / compiled.peak - 1), 2),
        "named_share": round(sum(buffer.size for buffer in replayed.live if buffer.layer) / live, 3),
        "trace_seconds": round(traced_s, 2),
        "compile_seconds": round(compiled.seconds, 2),
        "trace_resident_mib": traced_mib,
        "compile_resident_mib": resident(),
    }


def resident() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", nargs="?", default="")
    parser.add_argument("--case", nargs=4)
    chosen = parser.parse_args()
    if not any(importlib.util.find_spec(f"jax_cuda{version}_plugin") for version in (13, 12)):
        print("Nothing to compare with: the extra is missing. Install it with pip install 'oomproof[gpu-compile]'.")
        return
    if chosen.case:
        name, batch, policy, optimizer = chosen.case
        print("ANSWER" + json.dumps(figures(name, int(batch), policy, optimizer)))
        return
    cases = [
        (name, str(batch), policy, optimizer)
        for optimizer in ("adam", "sgd")
        for policy in (FLOAT, HALF)
        for name, batch, policies, optimizers in CASES
        if policy in policies and optimizer in optimizers and chosen.part in f"{name} {batch} {policy} {optimizer}"
    ]
    rows, failed = [], []
    for case in cases:
        command = [sys.executable, __file__, "--case", *case]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        except KeyboardInterrupt:
            # What is there is written down.
            break
        answers = [line for line in done.stdout.splitlines() if line.startswith("ANSWER")]
        if answers:
            rows.append(json.loads(answers[0].removeprefix("ANSWER")))
            print(rows[-1]["case"], rows[-1]["error_percent"], "%", file=sys.stderr, flush=True)
        else:
            failed.append({"case": " ".join(case), "error": done.stderr[-500:]})
            print(failed[-1], file=sys.stderr, flush=True)
    errors = sorted(abs(row["error_percent"]) for row in rows)
    summary = {"cases": len(rows), "median_error_percent": statistics.median(errors), "worst_error_percent": errors[-1]}
    if len(errors) > 1:
        summary["p95_error_percent"] = round(statistics.quantiles(errors, n=20, method="inclusive")[-1], 2)
    write_result(
        "estimate-jax-compile" + (f"-{chosen.part}" if chosen.part else ""),
        {"capability": CAPABILITY, "device_memory": MEMORY, "summary": summary, "rows": rows, "failed": failed},
    )


if __name__ == "__main__":
    main()
