"""What the proof costs before the first batch that is recomputed or cut, and what a step costs after it.

    python benchmarks/proof_time.py

One process for each backend, one after the other. ResNet50 is recomputed (cut, it is known not to be exact without a
proof); a transformer is cut. Each proof is made twice: the second time it is read from disk. The house rule is 5 s for
ResNet50 on two cores.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from typing import Any

from _common import write_result

_BACKENDS = ("tensorflow", "jax", "torch")
_LIMIT_S = 5.0


def resnet50() -> Any:
    import keras
    import numpy as np

    model = keras.applications.ResNet50(weights=None)
    model.compile("adam", "sparse_categorical_crossentropy")
    return model, np.random.default_rng(0).random((8, 224, 224, 3), "float32"), np.arange(8)


def transformer() -> Any:
    import keras
    import numpy as np
    from keras import layers

    x = layers.Input((64,), dtype="int32")
    h = layers.Embedding(1000, 64)(x)
    for _ in range(4):
        h = layers.LayerNormalization()(h + layers.MultiHeadAttention(4, 16, dropout=0.1)(h, h))
        h = layers.LayerNormalization()(h + layers.Dense(64)(layers.Dense(128, "relu")(h)))
    model = keras.Model(x, layers.Dense(1000)(h))
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    words = np.random.default_rng(0).integers(0, 1000, (8, 64))
    return model, words.astype("int32"), words


def measured() -> dict[str, Any]:
    from oomproof import _backends as backends
    from oomproof._backends.common.segments import labels
    from oomproof._training.proof_cache import ProofCache
    from oomproof._training.proving import Proving
    from oomproof._training.settings import Settings

    found: dict[str, Any] = {}
    for name, build, cut in (("ResNet50, recomputed", resnet50, False), ("transformer, cut", transformer, True)):
        model, x, y = build()
        backend = backends.current()
        data = backend.as_batch(x, y, None)[:2]
        seconds = []
        for _ in range(2):
            step = backend.step(model)
            step.prepare(data, "train")
            if not cut:
                known = labels(model)
                step.recompute = (f"{known[20]}..{known[60]}",)
            proving = Proving(step, backend.memory(), Settings(proofs=ProofCache(backend, model)))
            began = time.perf_counter()
            said = proving(data, 2 if cut else 1)
            seconds.append(time.perf_counter() - began)
        found[name] = {"said": str(said), "first_s": seconds[0], "recalled_s": seconds[1]}
    return found


def main() -> None:
    if len(sys.argv) > 1:
        print(json.dumps(measured()))
        return
    rows = {}
    for backend in _BACKENDS:
        with tempfile.TemporaryDirectory() as cache:
            environment = {**os.environ, "KERAS_BACKEND": backend, "OOMPROOF_CACHE_DIR": cache}
            command = [sys.executable, __file__, "child"]
            answer = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
            rows[backend] = json.loads(answer.stdout.splitlines()[-1])
            print(backend, rows[backend], flush=True)
    write_result("proof-time", {"limit_s": _LIMIT_S, "load": os.getloadavg()[0], "backends": rows})


if __name__ == "__main__":
    main()
