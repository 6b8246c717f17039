"""What a training step takes with the head as all the rest and with it in parts, as one JSON line: [bytes, bytes]."""

import json

import keras
import numpy as np
from here import BACKEND
from keras import layers
from recompute_models import compiled, made

from oomproof import _backends as backends

WORDS, TOKENS, SAMPLES = 2000, 32, 64


def language():
    """Its logits are 16 MB, all else next to nothing."""
    inputs = keras.Input((TOKENS,), dtype="int32")
    x = layers.Dense(16, "gelu", name="wide")(layers.Embedding(WORDS, 16, name="words")(inputs))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return compiled(keras.Model(inputs, layers.Dense(WORDS, name="logits")(x)), loss, metrics=["accuracy"])


def peak(mode, head):
    model = made(language, mode)
    backend = backends.current()
    step = backend.step(model)
    x = np.ones((SAMPLES, TOKENS), "int32")
    data = backend.as_batch(x, x, None)
    step.prepare(data, "train")
    step.head = head
    if BACKEND == "tensorflow":
        import tensorflow as tf

        for _ in range(2):
            tf.config.experimental.reset_memory_stats("CPU:0")
            step.train(data, 1, False)
        return tf.config.experimental.get_memory_info("CPU:0")["peak"]
    step.train(data, 1, False)
    if BACKEND == "jax":
        return step._program("train", data, 1).temporary
    return largest_tensor(lambda: step.train(data, 1, False))


def largest_tensor(run):
    """On torch, where nobody counts what is allocated on a CPU."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    sizes = [0]

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            results = function(*args, **(kwargs or {}))
            for leaf in keras.tree.flatten(results):
                if isinstance(leaf, torch.Tensor):
                    sizes.append(leaf.untyped_storage().nbytes())
            return results

    with Watch():
        run()
    return max(sizes)


def main(mode):
    print(json.dumps([peak(mode, head) for head in (None, ("logits", 8))]))
