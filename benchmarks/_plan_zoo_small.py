"""Models people train, so small that a step on a CPU takes a second, and still with enough to plan.

A plain step takes 80 to 400 MB. In most of them what the backward pass needs takes nearly all of it; `wide_residual` is
heavy with weights and slots, so that a quarter of its peak is less than those. A convolution on a CPU takes 30 MB to
work in, and both gradients of one run at once, however small the piece: models with convolutions are large enough for
that to be a part of their memory and not all of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
from keras import layers, losses, optimizers

from _plan_zoo import Case

_TEN = losses.SparseCategoricalCrossentropy(from_logits=True)
_Data = list[tuple[tuple[int, ...], str, int]]


def _case(inputs: Any, x: Any, batch: int, data: _Data, optimizer: Any = None) -> Case:
    """A classifier of ten classes."""
    model = keras.Model(inputs, layers.Dense(10)(x))
    model.compile(optimizer or optimizers.Adam(1e-4), _TEN)
    return Case(model, batch, data, 10)


def _table(columns: int) -> tuple[Any, _Data]:
    return keras.Input((columns,)), [((columns,), "float32", 0)]


def _words(length: int, width: int, vocabulary: int = 1000, mask: bool = False) -> tuple[Any, Any, _Data]:
    inputs = keras.Input((length,), dtype="int32")
    return inputs, layers.Embedding(vocabulary, width, mask_zero=mask)(inputs), [((length,), "int32", vocabulary)]


def _image(size: int) -> tuple[Any, _Data]:
    return keras.Input((size, size, 3)), [((size, size, 3), "float32", 0)]


def _patches(size: int, width: int) -> tuple[Any, Any, _Data]:
    """An image cut into patches of 4 × 4 without a convolution."""
    (inputs, data), count = _image(size), size // 4
    x = layers.Permute((1, 3, 2, 4, 5))(layers.Reshape((count, 4, count, 4, 3))(inputs))
    return inputs, layers.Dense(width)(layers.Reshape((count * count, 48))(x)), data


def _attending(x: Any, heads: int, causal: bool = False) -> Any:
    width = x.shape[-1]
    y = layers.LayerNormalization()(x)
    x = x + layers.MultiHeadAttention(heads, width // heads)(y, y, use_causal_mask=causal)
    y = layers.Dense(4 * width, activation="gelu")(layers.LayerNormalization()(x))
    return x + layers.Dense(width)(y)


def mlp() -> Case:
    inputs, data = _table(64)
    x = inputs
    for _ in range(16):
        x = layers.Dense(128, activation="relu")(x)
    return _case(inputs, x, 8192, data)


def norm_mlp() -> Case:
    inputs, data = _table(64)
    x = inputs
    for _ in range(8):
        x = layers.LayerNormalization()(layers.Dense(128, activation="gelu")(x))
    return _case(inputs, x, 4096, data)


def batch_norm_mlp() -> Case:
    inputs, data = _table(64)
    x = inputs
    for _ in range(8):
        x = layers.Activation("relu")(layers.BatchNormalization()(layers.Dense(128, use_bias=False)(x)))
    return _case(inputs, layers.Dropout(0.2)(x), 8192, data, optimizers.SGD(0.01, momentum=0.9))


def wide_residual() -> Case:
    inputs, data = _table(256)
    x = inputs
    for _ in range(6):
        y = layers.Dense(1024, activation="silu")(x)
        x = layers.Add()([x, layers.Dense(256)(y)])
    return _case(inputs, x, 2048, data, optimizers.SGD(0.01, momentum=0.9))


def words() -> Case:
    inputs, x, data = _words(128, 16, vocabulary=20_000)
    x = layers.Dense(64, activation="relu")(layers.Dense(64, activation="relu")(x))
    return _case(inputs, layers.GlobalAveragePooling1D()(x), 1024, data)


def lstm() -> Case:
    inputs, x, data = _words(32, 32)
    for _ in range(2):
        x = layers.LSTM(64, return_sequences=True)(x)
    return _case(inputs, layers.GlobalAveragePooling1D()(x), 512, data)


def gru() -> Case:
    inputs = keras.Input((32, 32))
    x = layers.Bidirectional(layers.GRU(64, return_sequences=True))(inputs)
    x = layers.GRU(64)(x)
    return _case(inputs, x, 512, [((32, 32), "float32", 0)])


def encoder() -> Case:
    inputs, x, data = _words(64, 48, mask=True)
    for _ in range(2):
        x = _attending(x, 4)
    return _case(inputs, layers.GlobalAveragePooling1D()(x), 128, data)


def decoder() -> Case:
    inputs, x, data = _words(64, 48, vocabulary=500)
    for _ in range(2):
        x = _attending(x, 4, causal=True)
    model = keras.Model(inputs, layers.Dense(500)(layers.LayerNormalization()(x)))
    model.compile(optimizers.AdamW(1e-4), _TEN)
    return Case(model, 128, data, 500, (((64,), "int32", 500),))


def vision_transformer() -> Case:
    inputs, x, data = _patches(32, 48)
    for _ in range(2):
        x = _attending(x, 4)
    return _case(inputs, layers.GlobalAveragePooling1D()(x), 128, data)


def mixer() -> Case:
    inputs, x, data = _patches(32, 48)
    for _ in range(2):
        y = layers.Permute((2, 1))(layers.LayerNormalization()(x))
        y = layers.Dense(64)(layers.Dense(96, activation="gelu")(y))
        x = layers.Add()([x, layers.Permute((2, 1))(y)])
        y = layers.Dense(192, activation="gelu")(layers.LayerNormalization()(x))
        x = layers.Add()([x, layers.Dense(48)(y)])
    return _case(inputs, layers.GlobalAveragePooling1D()(x), 128, data)


def two_inputs() -> Case:
    text, x, data = _words(48, 64)
    table, more = _table(128)
    x = _attending(x, 4)
    y = table
    for _ in range(4):
        y = layers.LayerNormalization()(layers.Dense(192, activation="relu")(y))
    both = layers.Concatenate()([layers.GlobalAveragePooling1D()(x), y])
    return _case([text, table], both, 128, data + more)


def several_outputs() -> Case:
    inputs, data = _table(64)
    x = inputs
    for _ in range(6):
        x = layers.LayerNormalization()(layers.Dense(192, activation="relu")(x))
    kind = layers.Dense(10)(layers.Dense(192, activation="tanh")(x))
    size = layers.Dense(1)(layers.Dense(192, activation="softplus")(x))
    again = layers.Dense(64)(layers.Dense(192, activation="elu")(x))
    model = keras.Model(inputs, [kind, size, again])
    model.compile(optimizers.Adam(1e-4), [_TEN, "mse", "mae"], loss_weights=[1.0, 0.5, 0.1])
    targets = (((1,), "int32", 10), ((1,), "float32", 0), ((64,), "float32", 0))
    return Case(model, 4096, data, 10, targets)


def autoencoder() -> Case:
    inputs, data = _table(96)
    x = inputs
    for width in (256, 256, 256, 32, 256, 256, 256):
        x = layers.Dense(width, activation="leaky_relu")(x)
    model = keras.Model(inputs, layers.Dense(96, activation="sigmoid")(x))
    model.compile(optimizers.RMSprop(1e-4), "mse")
    return Case(model, 4096, data, 0, (((96,), "float32", 0),))


def attention_pooling() -> Case:
    inputs = keras.Input((64, 32))
    x = inputs
    for _ in range(4):
        x = layers.LayerNormalization()(layers.Dense(128, activation="gelu")(x))
    share = layers.Softmax(axis=1)(layers.Dense(1)(layers.Dense(64, activation="tanh")(x)))
    return _case(inputs, layers.Flatten()(layers.Dot(axes=1)([share, x])), 192, [((64, 32), "float32", 0)])


def shared_layers() -> Case:
    inputs = keras.Input((64, 32))
    x = layers.Dense(96)(inputs)
    block = keras.Sequential([layers.LayerNormalization(), layers.Dense(96, activation="gelu")], name="shared_block")
    for _ in range(6):
        x = layers.Add()([x, block(x)])
    return _case(inputs, layers.GlobalAveragePooling1D()(x), 192, [((64, 32), "float32", 0)])


def convolutions() -> Case:
    inputs, data = _image(48)
    x = inputs
    for stage in range(3):
        for _ in range(2):
            y = layers.Conv2D(16 << stage, 3, padding="same", use_bias=False)(x)
            x = layers.Activation("relu")(layers.LayerNormalization()(y))
        x = layers.MaxPooling2D()(x)
    return _case(inputs, layers.GlobalAveragePooling2D()(x), 128, data)


def residual_network() -> Case:
    inputs, data = _image(48)
    x = layers.Conv2D(16, 3, 2, padding="same")(inputs)
    for width in (16, 32, 64):
        y = layers.BatchNormalization()(layers.Conv2D(width, 3, padding="same", use_bias=False)(x))
        y = layers.Conv2D(width, 3, padding="same", use_bias=False)(layers.Activation("relu")(y))
        short = x if x.shape[-1] == width else layers.Conv2D(width, 1)(x)
        x = layers.Activation("relu")(layers.Add()([short, layers.BatchNormalization()(y)]))
    return _case(inputs, layers.GlobalAveragePooling2D()(x), 192, data)


def waves() -> Case:
    inputs = x = keras.Input((512, 4))
    for width in (16, 32, 32, 64):
        x = layers.MaxPooling1D()(layers.Conv1D(width, 5, padding="same", activation="relu")(x))
    return _case(inputs, layers.GlobalAveragePooling1D()(x), 512, [((512, 4), "float32", 0)])


ZOO: dict[str, Callable[[], Case]] = {
    make.__name__: make
    for make in (
        mlp,
        norm_mlp,
        batch_norm_mlp,
        wide_residual,
        words,
        lstm,
        gru,
        encoder,
        decoder,
        vision_transformer,
        mixer,
        two_inputs,
        several_outputs,
        autoencoder,
        attention_pooling,
        shared_layers,
        convolutions,
        residual_network,
        waves,
    )
}
