"""What it saves, and costs, to take the pieces of a batch from the host: JAX, and TensorFlow in graph mode, on a GPU.

    KERAS_BACKEND=jax python benchmarks/host_fed.py
    KERAS_BACKEND=tensorflow python benchmarks/host_fed.py

Large images through a small net, a batch in pieces in `fit`, once with the batch where Keras puts it and once from the
host, each in a process of its own. The peak is that of the process, with model and batches; times are per step.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from typing import Any
from unittest import mock

# In an epoch: the last of them has none after it to be put in its place.
_BATCHES = 4
WAYS = ("as Keras feeds", "from the host")


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--batch", type=int, default=1024)
    options.add_argument("--pieces", default="16,10", help="in how many; JAX takes the next power of two")
    options.add_argument("--size", type=int, default=224)
    options.add_argument("--child", help="internal")
    chosen = options.parse_args()
    if chosen.child:
        print(json.dumps(_trained(**json.loads(chosen.child))))
        return
    from _common import environment, write_result

    if environment()["gpu"] is None:
        print("needs a GPU", file=sys.stderr)
        return
    backend, rows = os.environ.get("KERAS_BACKEND", "tensorflow"), []
    for pieces in map(int, chosen.pieces.split(",")):
        for way in WAYS:
            wanted = {"batch": chosen.batch, "pieces": pieces, "size": chosen.size, "way": way}
            command = [sys.executable, __file__, "--child", json.dumps(wanted)]
            child = subprocess.run(command, capture_output=True, text=True, check=False)
            failed = {"error": child.stderr.strip()[-400:]} if child.returncode else {}
            rows.append(wanted | (failed or json.loads(child.stdout.strip().splitlines()[-1])))
            print(rows[-1], flush=True)
    asked = f"KERAS_BACKEND={backend} python benchmarks/host_fed.py --pieces {chosen.pieces}"
    write_result(f"host-fed-gpu-{backend}", {"command": asked, "rows": rows})


def _trained(batch: int, pieces: int, size: int, way: str) -> dict[str, Any]:
    import keras
    import numpy as np

    import oomproof

    backend = keras.backend.backend()
    if way == "as Keras feeds":
        _leave_it_to_keras(backend)
    keras.utils.set_random_seed(0)
    layers: list[Any] = [keras.Input((size, size, 3)), keras.layers.Conv2D(32, 8, 8)]
    for _ in range(3):
        layers += [keras.layers.Conv2D(32, 3, padding="same", activation="relu"), keras.layers.LayerNormalization()]
    model = keras.Sequential([*layers, keras.layers.GlobalAveragePooling2D(), keras.layers.Dense(10)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss, jit_compile=backend == "jax")
    rng = np.random.default_rng(0)
    x = rng.normal(size=(64, size, size, 3)).astype("float32")[np.arange(_BATCHES * batch) % 64]
    y = rng.integers(0, 10, _BATCHES * batch)
    oomproof.guard(model, micro_batch_size=-(-batch // pieces), plan=oomproof.Plan())
    seconds = []

    class Clock(keras.callbacks.Callback):  # type: ignore[misc]
        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            self.began = time.perf_counter()

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            float(logs["loss"])
            seconds.append(time.perf_counter() - self.began)

    history = model.fit(x, y, batch_size=batch, epochs=3, shuffle=False, verbose=0, callbacks=[Clock()])
    return {
        "batch_bytes": batch * x[0].nbytes,
        "peak": _peak(backend),
        "ms": round(1000 * statistics.median(seconds[2:]), 1),
        "ms_at_best": round(1000 * min(seconds[2:]), 1),
        "loss": history.history["loss"][-1],
    }


def _leave_it_to_keras(backend: str) -> None:
    if backend == "jax":
        mock.patch("oomproof._backends.jax.fed", lambda model, iterator: iterator).start()
    else:
        mock.patch("oomproof._backends.tensorflow.step.on_host", return_value=False).start()


def _peak(backend: str) -> int | None:
    if backend == "jax":
        import jax

        stats = jax.local_devices()[0].memory_stats()
        return int(stats["peak_bytes_in_use"]) if stats else None
    import tensorflow as tf

    gpus = tf.config.list_logical_devices("GPU")
    return int(tf.config.experimental.get_memory_info("GPU:0")["peak"]) if gpus else None


if __name__ == "__main__":
    main()
