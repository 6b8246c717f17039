"""A model whose weights fit and whose optimizer's slots do not, under TensorFlow's own allocator: what does a user get?

    python slots_child.py built|unbuilt on_batch|fit|evaluate_first

Prints one JSON line: the type of the error and its text.
"""

from __future__ import annotations

import json
import os
import sys

os.environ |= {"KERAS_BACKEND": "tensorflow", "TF_CPP_MIN_LOG_LEVEL": "3", "TF_ENABLE_ONEDNN_OPTS": "0"}
os.environ |= {"TF_CPU_ALLOCATOR_USE_BFC": "true", "TF_CPU_BFC_MEM_LIMIT_IN_MB": "100"}

import keras
import numpy as np

import oomproof


def main(built: str, how: str) -> None:
    # 48 MiB of weights: the two slots of Adam for them are more than what is left. For itself each layer is small, for
    # drawing its weights takes three times as much.
    layers = [*(keras.layers.Dense(2048) for _ in range(3)), keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input((2048,)), *layers] if built == "built" else layers)
    model.compile("adam", "mse", metrics=["mae"])
    oomproof.guard(model, verbose=0)
    x, y = np.ones((4, 2048), "float32"), np.ones((4, 1), "float32")
    try:
        if how == "on_batch":
            model.train_on_batch(x, y)
        else:
            if how == "evaluate_first":
                model.evaluate(x, y, verbose=0)
            model.fit(x, y, batch_size=4, verbose=0)
        answer = {"error": None, "text": ""}
    except Exception as error:
        answer = {"error": type(error).__name__, "text": str(error)}
    print(json.dumps(answer))


if __name__ == "__main__":
    main(*sys.argv[1:])
