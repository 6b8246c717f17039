"""What a training step takes with and without recomputation, as one JSON line: [bytes, bytes]."""

import json

import keras
import numpy as np
from here import BACKEND
from keras import layers
from recompute_models import compiled, made

from oomproof import _backends as backends


def deep(blocks=24):
    """Of dense layers: convolutions on CPUs take more memory for themselves than what they make."""
    x = inputs = keras.Input((256,))
    for n in range(blocks):
        y = layers.BatchNormalization(name=f"norm_{n}")(x)
        y = layers.ReLU(name=f"relu_{n}")(y)
        y = layers.Dropout(0.1, name=f"drop_{n}")(y)
        y = layers.Dense(256, name=f"dense_{n}")(y)
        x = layers.Add(name=f"add_{n}")([x, y])
    return compiled(keras.Model(inputs, layers.Dense(3, "softmax", name="head")(x)))


def peak(mode, segments):
    """Bytes a training step needs, or on torch keeps for its backward pass."""
    model = made(deep, mode)
    backend = backends.current()
    step = backend.step(model)
    data = backend.as_batch(np.zeros((2048, 256), "float32"), np.zeros(2048, "int32"), None)
    step.prepare(data, "train")
    step.recompute = segments
    if BACKEND == "tensorflow":
        import tensorflow as tf

        for _ in range(2):
            tf.config.experimental.reset_memory_stats("CPU:0")
            step.train(data, 1, False)
        return tf.config.experimental.get_memory_info("CPU:0")["peak"]
    if BACKEND == "jax":
        return step._program("train", data, 1).temporary
    import torch

    kept = {}

    def pack(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
    with hooks, torch.enable_grad(), step.engine.scope():
        outputs = step.engine.call(torch.from_numpy(np.array(data[0])), True)
    del outputs
    return sum(kept.values())


def main(mode):
    blocks = tuple(f"norm_{n}..add_{n}" for n in range(24))
    print(json.dumps([peak(mode, segments) for segments in ((), blocks)]))
