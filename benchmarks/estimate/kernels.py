"""What single layers take besides their tensors, on a GPU: convolutions and recurrent layers, one after another.

    KERAS_BACKEND=torch python benchmarks/estimate/kernels.py --seconds 60 --out DIR         also jax, tensorflow
    KERAS_BACKEND=jax python benchmarks/estimate/kernels.py --numbers 15,52 --option NAME=VALUE --out DIR

The layers are drawn at random, always the same ones, and none is of the zoo that estimates are scored on: rules for
workspaces are to be made from these, so that the scoring half stays unseen. Every layer is a line of
DIR/kernels-BACKEND.jsonl. On torch: bytes kept and taken forward and backward, with and without a gradient by the
input. On JAX: the workspace XLA's autotuner settled on, by kernel, and what cuDNN asks for an LSTM. On TensorFlow:
bytes beyond results, by op, after the first run, in which kernels are searched for. Layers that are in
benchmarks/estimate/truth are not run again, unless they are asked for by number; --option is one of XLA's.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import math
import os
import pathlib
import random
import re
import time
from collections.abc import Callable
from typing import Any

from collect import TRUTH, read

SEED = 11
COUNT = 600
# Elements of the input or the output, at most.
MOST = 2**26
Layer = dict[str, Any]


def drawn() -> list[Layer]:
    rng = random.Random(SEED)
    layers: list[Layer] = []
    while len(layers) < COUNT:
        kind = rng.choice(["conv2d"] * 4 + ["conv2d_transpose"] * 3 + ["conv3d", "conv1d", "lstm", "gru"])
        dtype = rng.choice(["float32", "float32", "float16", "bfloat16"])
        if kind in ("lstm", "gru"):
            layer: Layer = {
                "kind": kind,
                "dtype": dtype,
                "batch": rng.choice([16, 64, 256]),
                "steps": rng.choice([16, 64, 200]),
                "inputs": rng.choice([32, 128, 300]),
                "units": rng.choice([64, 128, 200, 512]),
                "bidirectional": rng.random() < 0.4,
            }
            layers.append(layer)
            continue
        rank = {"conv1d": 1, "conv3d": 3}.get(kind, 2)
        size = rng.choice({1: [256, 1000, 4096], 2: [7, 14, 28, 32, 56, 64, 112, 128], 3: [8, 14, 28]}[rank])
        layer = {
            "kind": kind,
            "dtype": dtype,
            "batch": 2 ** rng.randint(3, 11),
            "size": [size] * rank,
            "inputs": rng.choice([1, 3, 16, 24, 32, 64, 96, 128, 256]),
            "filters": rng.choice([1, 3, 16, 24, 32, 64, 96, 128, 256, 512]),
            "kernel": rng.choice([1, 2, 3, 3, 3, 4, 5, 7]),
            "strides": rng.choice([1, 1, 2]),
            "dilation": 1,
        }
        if layer["strides"] == 1 and kind != "conv2d_transpose" and rng.random() < 0.15:
            layer["dilation"] = 2
        grown = layer["strides"] if kind == "conv2d_transpose" else 1
        elements = layer["batch"] * max(size**rank * layer["inputs"], (size * grown) ** rank * layer["filters"])
        if 2**18 <= elements <= MOST:
            layers.append(layer)
    return layers


def built(layer: Layer) -> tuple[Any, tuple[int, ...]]:
    """The Keras layer, and the shape of its input."""
    import keras

    policy = {"float32": "float32"}.get(layer["dtype"], f"mixed_{layer['dtype']}")
    if layer["kind"] in ("lstm", "gru"):
        make = {"lstm": keras.layers.LSTM, "gru": keras.layers.GRU}[layer["kind"]]
        made = make(layer["units"], return_sequences=True, dtype=policy)
        if layer["bidirectional"]:
            made = keras.layers.Bidirectional(made, dtype=policy)
        shape: tuple[int, ...] = (layer["batch"], layer["steps"], layer["inputs"])
    else:
        make = {
            "conv1d": keras.layers.Conv1D,
            "conv2d": keras.layers.Conv2D,
            "conv3d": keras.layers.Conv3D,
            "conv2d_transpose": keras.layers.Conv2DTranspose,
        }[layer["kind"]]
        made = make(
            layer["filters"],
            layer["kernel"],
            layer["strides"],
            padding="same",
            dilation_rate=layer["dilation"],
            use_bias=False,
            dtype=policy,
        )
        shape = (layer["batch"], *layer["size"], layer["inputs"])
    made.build(shape)
    return made, shape


def on_torch(layer: Layer) -> Layer:
    import torch

    made, shape = built(layer)
    found: Layer = {}
    for inner in (False, True):
        gc.collect()
        torch.cuda.empty_cache()
        x = torch.ones(shape, dtype=getattr(torch, layer["dtype"]), device="cuda").requires_grad_(inner)
        for run in range(2):
            made.zero_grad()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            y = made(x)
            forward = {"kept": torch.cuda.memory_allocated() - before}
            forward["peak"] = torch.cuda.max_memory_allocated() - before
            gradient = torch.ones_like(y)
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            y.backward(gradient)
            backward = {"kept": torch.cuda.memory_allocated() - before}
            backward["peak"] = torch.cuda.max_memory_allocated() - before
            if run:
                found["inner" if inner else "first"] = {"forward": forward, "backward": backward}
            found |= {"output": list(y.shape), "output_strides": list(y.stride())}
            del y, gradient
            x.grad = None
        del x
    found["weights"] = sum(v.value.numel() for v in made.trainable_variables)
    return found


_CALL = re.compile(r"= (\(.*?\)|\S+) custom-call\(.*?custom_call_target=\"(__cud[^\"]*)\"")
_ALGORITHM = re.compile(r'"algo_id":"?(\d+)')
_WINDOW = re.compile(r"window={[^}]*}, dim_labels=[^,]*")


def pulled(layer: Layer) -> tuple[Any, tuple[Any, ...]]:
    """A layer and both its gradients as one function on JAX, and the shapes of what it takes."""
    import jax
    import jax.numpy as jnp
    import keras

    made, shape = built(layer)
    weights = [v.value for v in made.trainable_variables]
    # Weights are cast where a layer is called, which only happens inside a model.
    model = keras.Sequential([keras.Input(batch_shape=shape, dtype=layer["dtype"]), made])

    def called(weights: Any, x: Any) -> Any:
        return model.stateless_call(weights, [], x)[0]

    def function(weights: Any, x: Any, gradient: Any) -> Any:
        y, back = jax.vjp(called, weights, x)
        return y, back(gradient)

    x = jax.ShapeDtypeStruct(shape, jnp.dtype(layer["dtype"]))
    return function, (weights, x, jax.eval_shape(called, weights, x))


def on_jax(layer: Layer, options: dict[str, str]) -> Layer:
    import jax

    if layer["kind"] == "gru":
        return {"skipped": "Keras does not hand it to cuDNN"}
    if layer["kind"] == "lstm":
        from jax.experimental.rnn import gpu_rnn

        sizes = gpu_rnn.compute_rnn_workspace_reserve_space_sizes
        asked = [layer[key] for key in ("inputs", "units")] + [1, layer["batch"], layer["steps"], 0.0]
        return {str(both): list(sizes(*asked, both, False)) for both in (False, True)}
    function, arguments = pulled(layer)
    compiled = jax.jit(function).lower(*arguments).compile(compiler_options=options)
    calls = []
    for line in compiled.as_text().splitlines():
        if match := _CALL.search(line):
            algorithm, window = _ALGORITHM.search(line), _WINDOW.search(line)
            calls.append([match[2], match[1], algorithm and algorithm[1], window and window[0]])
    analysis = compiled.memory_analysis()
    return {"calls": calls, "temporary": analysis.temp_size_in_bytes, "outputs": analysis.output_size_in_bytes}


def functions(layer: Layer) -> dict[str, tuple[Callable[..., Any], list[Any]]]:
    """Forward pass and gradients of a layer as functions on TensorFlow, each with what it is given: image, filter,
    gradient by the result."""
    import tensorflow as tf

    made, shape = built(layer)
    filters = made.trainable_variables[0]
    given = [
        tf.TensorSpec(size, layer["dtype"]) for size in (shape, tuple(filters.shape), made.compute_output_shape(shape))
    ]

    def part(what: str) -> Callable[..., Any]:
        def run(x: Any, w: Any, g: Any) -> Any:
            value, filters._value = filters._value, w
            try:
                with tf.GradientTape() as tape:
                    tape.watch([x, w])
                    y = made(x)
            finally:
                filters._value = value
            return y if what == "forward" else tape.gradient(y, x if what == "input" else w, output_gradients=g)

        return run

    return {what: (part(what), given) for what in ("forward", "input", "filter")}


def on_tensorflow(layer: Layer) -> Layer:
    import tensorflow as tf

    if layer["kind"] in ("lstm", "gru"):
        return {"skipped": "cuDNN's recurrent kernels are not always there"}
    device = "GPU:0" if tf.config.list_physical_devices("GPU") else "CPU:0"
    found: Layer = {"bytes": {}}
    for what, (plain, specs) in functions(layer).items():
        function = tf.function(plain, jit_compile=False, autograph=False)
        arguments = [tf.ones(spec.shape, spec.dtype) for spec in specs]
        for run in range(3):
            before = tf.config.experimental.get_memory_info(device)["current"]
            tf.config.experimental.reset_memory_stats(device)
            result = function(*arguments)
            float(tf.reduce_sum(tf.cast(tf.reshape(result, [-1])[:1], tf.float32)))
            peak = tf.config.experimental.get_memory_info(device)["peak"] - before
            if run in (0, 2):
                found["bytes"][what if run else f"{what}, first run"] = peak
            size = math.prod(result.shape) * result.dtype.size
            del result
        found["bytes"][f"{what}, result"] = size
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--part", default="0/1", help="this one of so many parts, for several processes side by side")
    parser.add_argument("--numbers", default=None, help="of the layers to run, with commas; all otherwise")
    parser.add_argument("--option", action="append", default=[], help="NAME=VALUE for XLA, on JAX; may be repeated")
    parser.add_argument("--out", type=pathlib.Path, required=True)
    options = parser.parse_args()
    backend = os.environ.get("KERAS_BACKEND", "tensorflow")
    os.environ |= {"TF_FORCE_GPU_ALLOW_GROWTH": "true", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    wanted = [int(number) for number in options.numbers.split(",")] if options.numbers else None
    chosen = dict(option.split("=") for option in options.option)
    on_xla = functools.partial(on_jax, options=chosen)
    ways: dict[str, Callable[[Layer], Layer]] = {"torch": on_torch, "jax": on_xla, "tensorflow": on_tensorflow}
    run = ways[backend]
    known = [row for row in read(TRUTH / f"kernels-{backend}.jsonl") if "failed" not in row]
    done = {row["number"] for row in known} if wanted is None else set()
    at, parts = map(int, options.part.split("/"))
    end = time.monotonic() + options.seconds
    options.out.mkdir(parents=True, exist_ok=True)
    name = "-".join([f"kernels-{backend}", str(at), *chosen.values()])
    with (options.out / f"{name}.jsonl").open("a") as file:
        for number, layer in enumerate(drawn()):
            if number % parts != at or number in done or (wanted is not None and number not in wanted):
                continue
            if time.monotonic() > end:
                break
            began = time.monotonic()
            try:
                found = run(layer)
            except Exception as error:
                found = {"failed": f"{type(error).__name__}: {error}"[:300]}
            row = layer | found | {"number": number, "seconds": round(time.monotonic() - began, 2)}
            row |= {"options": chosen} if chosen else {}
            file.write(json.dumps(row) + "\n")
            file.flush()


if __name__ == "__main__":
    main()
