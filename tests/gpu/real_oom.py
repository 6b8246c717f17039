"""Real out-of-memory errors on a GPU, by hand, on each backend:

    KERAS_BACKEND=jax python tests/gpu/real_oom.py --caps 6000,3000 --recoveries 50

Trains a conv net with plain Keras on the whole card for reference; then guarded on the same card, capped far below
what a step needs; then with memory that disappears in every epoch, after oomproof has looked and before the step runs,
until there were as many recoveries as asked for. Each in a process of its own. Results are committed under
tests/gpu/results: final weights against the reference, events, peaks, seconds.
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

BATCH, STEPS, EPOCHS = 512, 3, 2


def capped(backend: str, megabytes: int) -> None:
    """Makes a small card of a large one. Before the framework is used for anything else."""
    if backend == "jax":
        total = float(
            subprocess.check_output(["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"])
        )
        if megabytes:
            os.environ["XLA_PYTHON_CLIENT_MEM_FRACTION"] = f"{megabytes / total:.6f}"
        # Rounding of TensorFloat-32 would hide differences that matter.
        os.environ["JAX_DEFAULT_MATMUL_PRECISION"] = "highest"
    elif backend == "torch":
        import torch

        if megabytes:
            total = torch.cuda.get_device_properties(0).total_memory / 2**20
            torch.cuda.set_per_process_memory_fraction(megabytes / total)
        torch.backends.cudnn.allow_tf32 = False
    else:
        import tensorflow as tf

        if megabytes:
            limit = tf.config.LogicalDeviceConfiguration(memory_limit=megabytes)
            tf.config.set_logical_device_configuration(tf.config.list_physical_devices("GPU")[0], [limit])
        else:
            tf.config.experimental.set_memory_growth(tf.config.list_physical_devices("GPU")[0], True)
        tf.config.experimental.enable_tensor_float_32_execution(False)


def ballast(backend: str, size: int) -> Any:
    """Memory that is taken, in small arrays: one large one might itself not find a gap."""
    count = max(1, size // 2**24)
    if backend == "jax":
        import jax

        return jax.block_until_ready([jax.numpy.zeros((2**22,), "float32") + index for index in range(count)])
    if backend == "torch":
        import torch

        return [torch.empty(2**22, device="cuda") for _ in range(count)]
    import tensorflow as tf

    return [tf.fill((2**22,), float(index)) for index in range(count)]


def build(net: str, jit: bool | str) -> Any:
    import keras

    keras.utils.set_random_seed(0)
    layers: list[Any] = [keras.Input((32, 32, 3))]
    if net == "tokens":
        # Without convolutions, which take XLA minutes to compile with some versions of cuDNN.
        layers += [keras.layers.Reshape((256, 12))]
    for _ in range(6):
        conv = keras.layers.Conv2D(128, 3, padding="same", activation="relu")
        layers += [conv if net == "conv" else keras.layers.Dense(512, activation="relu")]
        layers += [keras.layers.LayerNormalization()]
    layers += [keras.layers.GlobalAveragePooling2D() if net == "conv" else keras.layers.GlobalAveragePooling1D()]
    model = keras.Sequential([*layers, keras.layers.Dense(10)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.01, momentum=0.9), loss, metrics=["accuracy"], jit_compile=jit)
    return model


def take_memory_in_every_epoch(model: Any, backend: str, blind: bool) -> Any:
    """Leaves room for a part of the batch, each time another one. Returns the callback that gives it back."""
    import keras
    import numpy as np

    if blind and backend == "jax":
        # Programs that are known not to fit are run all the same, to meet the allocator's own error.
        from oomproof._backends.jax import compiled

        compiled.Program.check_room = lambda *_, **__: None  # type: ignore[method-assign]
    driver = vars(model)["_oomproof_guard"]._ready()
    original, held, rng = driver.step.train, [], np.random.default_rng(0)
    epochs = {"now": 0}

    def train(*args: Any) -> Any:
        if not held and epochs["now"]:
            use, limit = driver.memory.usage(), driver.memory.describe().limit
            need = max(need for _, need in driver.training.measured["train"].evidence.needs)
            held.extend(ballast(backend, int(limit - use.current - need * rng.uniform(0.3, 0.6))))
        return original(*args)

    class GiveBack(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            epochs["now"] = epoch
            held.clear()

    driver.step.train = train
    return GiveBack()


def child(backend: str, net: str, cap: int, jit: str, recoveries: int, blind: bool, guarded: bool, out: str) -> None:
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    capped(backend, cap)
    import keras
    import numpy as np

    import oomproof

    model = build(net, {"auto": "auto", "yes": True, "no": False}[jit])
    rng = np.random.default_rng(0)
    steps, epochs = (1, recoveries + 1) if recoveries else (STEPS, EPOCHS)
    x, y = rng.normal(size=(steps * BATCH, 32, 32, 3)).astype("float32"), rng.integers(0, 10, steps * BATCH)
    pulled: list[int] = []

    class Batches(keras.utils.PyDataset):
        def __len__(self) -> int:
            return steps

        def __getitem__(self, index: int) -> Any:
            pulled.append(index)
            return x[index * BATCH : (index + 1) * BATCH], y[index * BATCH : (index + 1) * BATCH]

    if guarded:
        # A plan is followed and no other made: here memory is to run out.
        oomproof.guard(model, plan=oomproof.Plan())
    callbacks = [take_memory_in_every_epoch(model, backend, blind)] if recoveries and guarded else []
    began = time.perf_counter()
    history = model.fit(Batches(), epochs=epochs, shuffle=False, verbose=0, callbacks=callbacks)
    seconds = time.perf_counter() - began
    np.savez(f"{out}.npz", *model.get_weights())
    run = history.run.to_dict() if guarded else None
    events = run["events"] if run else []
    ooms = [event for event in events if event["kind"] == "oom"]
    result = {
        "backend": backend,
        "net": net,
        "cap_mb": cap,
        "jit_compile": bool(model.jit_compile),
        "guarded": guarded,
        "blind": blind,
        "seconds": seconds,
        "epochs": epochs,
        "out_of_memory": len(ooms),
        "seconds_until_an_error_is_told": [round(event["seconds"], 3) for event in ooms],
        "loss": history.history["loss"],
        "iterations": int(model.optimizer.iterations),
        # Keras itself reads the first one once more, to see its shape.
        "batches_pulled": [pulled.count(index) for index in range(steps)],
        "messages": [event["message"] for event in events][:40],
        "versions": run["versions"] if run else None,
        "device": run["device"] if run else None,
        "peak": run["peak"] if run else None,
    }
    pathlib.Path(f"{out}.json").write_text(json.dumps(result))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--caps", default="6000,3000")
    parser.add_argument("--recoveries", type=int, default=0)
    parser.add_argument("--recovery-cap", type=int, default=6000)
    parser.add_argument("--jit", choices=["auto", "yes", "no"], default="auto")
    parser.add_argument("--net", choices=["conv", "tokens"], default="conv")
    parser.add_argument("--blind", action="store_true", help="JAX: also run what is known not to fit")
    parser.add_argument("--out", default=None)
    parser.add_argument("--child", default=None, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        child(**json.loads(arguments.child))
        return
    import numpy as np

    backend = os.environ.setdefault("KERAS_BACKEND", "tensorflow")
    out = pathlib.Path(arguments.out or f"tests/gpu/results/real_oom_{backend}.json")
    out.parent.mkdir(parents=True, exist_ok=True)
    caps = [int(cap) for cap in arguments.caps.split(",") if cap]
    plans: list[dict[str, Any]] = []
    if caps:
        plans += [{"cap": 0, "recoveries": 0, "guarded": False}]
        plans += [{"cap": cap, "recoveries": 0, "guarded": True} for cap in caps]
    if arguments.recoveries:
        plans += [{"cap": 0, "recoveries": arguments.recoveries, "guarded": False}]
        plans += [{"cap": arguments.recovery_cap, "recoveries": arguments.recoveries, "guarded": True}]
    results: list[dict[str, Any]] = []
    reference: list[Any] = []
    with tempfile.TemporaryDirectory() as folder:
        for number, plan in enumerate(plans):
            file = f"{folder}/{number}"
            told = plan | {
                "backend": backend,
                "net": arguments.net,
                "jit": arguments.jit,
                "blind": arguments.blind,
                "out": file,
            }
            command = [sys.executable, __file__, "--child", json.dumps(told)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if not os.path.exists(f"{file}.json"):
                results.append(plan | {"failed": (done.stdout + done.stderr)[-3000:]})
            else:
                result = json.loads(pathlib.Path(f"{file}.json").read_text())
                with np.load(f"{file}.npz") as archive:
                    weights = [archive[name] for name in archive.files]
                if not plan["guarded"]:
                    reference = weights
                pairs = list(zip(reference, weights, strict=True))
                result["largest_weight_difference"] = max(float(np.max(np.abs(a - b))) for a, b in pairs)
                result["largest_weight"] = max(float(np.max(np.abs(a))) for a, _ in pairs)
                results.append(result)
            print(json.dumps(results[-1], indent=1), flush=True)
            out.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
