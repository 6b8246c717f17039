"""Fourteen models people train, in two sizes: a small one for CPUs, a large one for GPUs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import keras
from keras import layers


class Case(NamedTuple):
    """A model with the batch it is asked for: `data` has (shape, dtype, exclusive upper bound) for each input.

    `targets` has the same for each output; left out, there is one: a class for each sample.
    """

    model: Any
    batch: int
    data: list[tuple[tuple[int, ...], str, int]]
    classes: int
    targets: tuple[tuple[tuple[int, ...], str, int], ...] = ()


def _compiled(inputs: Any, outputs: Any, name: str) -> Any:
    model = keras.Model(inputs, outputs, name=name)
    model.compile(keras.optimizers.Adam(1e-4), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def _image(size: int) -> tuple[Any, list[tuple[tuple[int, ...], str, int]]]:
    return keras.Input((size, size, 3)), [((size, size, 3), "float32", 0)]


def _conv(x: Any, width: int, norm: Callable[[], Any], stride: int = 1, size: int = 3) -> Any:
    return layers.Activation("relu")(norm()(layers.Conv2D(width, size, stride, padding="same", use_bias=False)(x)))


def _classes_of(name: str, inputs: Any, x: Any, batch: int, data: list[tuple[tuple[int, ...], str, int]]) -> Case:
    """An image classifier: features, averaged, and ten classes."""
    return Case(_compiled(inputs, layers.Dense(10)(layers.GlobalAveragePooling2D()(x)), name), batch, data, 10)


def plain_cnn(large: bool) -> Case:
    inputs, data = _image(64 if large else 24)
    x = inputs
    for stage in range(3):
        for _ in range(3):
            x = _conv(x, (64 if large else 12) << stage, layers.LayerNormalization)
        x = layers.MaxPooling2D()(x)
    return _classes_of("plain_cnn", inputs, x, 256 if large else 128, data)


def residual_batchnorm(large: bool) -> Case:
    inputs, data = _image(64 if large else 24)
    x = _conv(inputs, 64 if large else 16, layers.BatchNormalization)
    for stage in range(3):
        width = (64 if large else 16) << stage
        for block in range(3):
            stride = 2 if stage and not block else 1
            y = _conv(x, width, layers.BatchNormalization, stride)
            y = layers.BatchNormalization()(layers.Conv2D(width, 3, padding="same")(y))
            short = x if stride == 1 and x.shape[-1] == width else layers.Conv2D(width, 1, stride)(x)
            x = layers.Activation("relu")(layers.Add()([short, y]))
    return _classes_of("residual_batchnorm", inputs, x, 256 if large else 128, data)


def depthwise(large: bool) -> Case:
    inputs, data = _image(96 if large else 24)
    x = _conv(inputs, 32 if large else 16, layers.BatchNormalization, 2)
    for width in (48, 64, 96, 128):
        width = width * 2 if large else width // 2
        y = layers.Conv2D(4 * x.shape[-1], 1, activation="swish")(x)
        y = layers.BatchNormalization()(layers.DepthwiseConv2D(3, padding="same")(y))
        x = layers.Conv2D(width, 1)(layers.Activation("swish")(y))
    return _classes_of("depthwise", inputs, x, 256 if large else 128, data)


def unet(large: bool) -> Case:
    inputs, data = _image(256 if large else 32)
    width, skips, x = (32 if large else 8), [], inputs
    for depth in range(3):
        x = _conv(_conv(x, width << depth, layers.BatchNormalization), width << depth, layers.BatchNormalization)
        skips.append(x)
        x = layers.MaxPooling2D()(x)
    x = _conv(x, width << 3, layers.BatchNormalization)
    for depth in (2, 1, 0):
        x = layers.Concatenate()([layers.Conv2DTranspose(width << depth, 2, 2)(x), skips[depth]])
        x = _conv(_conv(x, width << depth, layers.BatchNormalization), width << depth, layers.BatchNormalization)
    return _classes_of("unet", inputs, x, 32 if large else 64, data)


def inception(large: bool) -> Case:
    inputs, data = _image(64 if large else 20)
    x = _conv(inputs, 64 if large else 16, layers.LayerNormalization)
    for _ in range(4):
        width = 32 if large else 8
        branches = [_conv(x, width, layers.LayerNormalization, size=size) for size in (1, 3, 5)]
        x = layers.Concatenate()([*branches, layers.MaxPooling2D(3, 1, padding="same")(x)])
        x = layers.Conv2D(64 if large else 16, 1)(x)
    return _classes_of("inception", inputs, x, 256 if large else 128, data)


def _block(x: Any, heads: int, causal: bool = False) -> Any:
    width = x.shape[-1]
    y = layers.LayerNormalization()(x)
    x = x + layers.MultiHeadAttention(heads, width // heads)(y, y, use_causal_mask=causal)
    y = layers.Dense(4 * width, activation="gelu")(layers.LayerNormalization()(x))
    return x + layers.Dropout(0.1)(layers.Dense(width)(y))


def tagger(depth: int, width: int, length: int, words: int) -> Any:
    """The transformer of the step benchmarks, not compiled: a class for each token."""
    x = inputs = keras.Input((length,), dtype="int32")
    x = layers.Embedding(words, width)(x)
    for _ in range(depth):
        x = layers.LayerNormalization()(layers.Add()([x, layers.MultiHeadAttention(8, width // 8)(x, x)]))
        hidden = layers.Dense(width)(layers.Dense(4 * width, activation="gelu")(x))
        x = layers.LayerNormalization()(layers.Add()([x, hidden]))
    return keras.Model(inputs, layers.Dense(words)(x))


def _tokens(length: int, vocabulary: int, width: int, mask: bool) -> tuple[Any, Any, Any]:
    inputs = keras.Input((length,), dtype="int32")
    x = layers.Embedding(vocabulary, width, mask_zero=mask)(inputs)
    return inputs, x, [((length,), "int32", vocabulary)]


def encoder(large: bool) -> Case:
    inputs, x, data = _tokens(256 if large else 32, 1000, 512 if large else 48, mask=True)
    for _ in range(6 if large else 4):
        x = _block(x, 8 if large else 4)
    outputs = layers.Dense(10)(layers.GlobalAveragePooling1D()(x))
    return Case(_compiled(inputs, outputs, "encoder"), 64, data, 10)


def decoder(large: bool) -> Case:
    inputs, x, data = _tokens(256 if large else 32, 1000, 512 if large else 48, mask=False)
    for _ in range(6 if large else 4):
        x = _block(x, 8 if large else 4, causal=True)
    outputs = layers.Dense(10)(layers.Flatten()(layers.Dense(8)(x)))
    return Case(_compiled(inputs, outputs, "decoder"), 64, data, 10)


def vision_transformer(large: bool) -> Case:
    inputs, data = _image(128 if large else 32)
    x = layers.Reshape((-1, 384 if large else 48))(layers.Conv2D(384 if large else 48, 8, 8)(inputs))
    for _ in range(6 if large else 4):
        x = _block(x, 6 if large else 4)
    outputs = layers.Dense(10)(layers.GlobalAveragePooling1D()(x))
    return Case(_compiled(inputs, outputs, "vision_transformer"), 128, data, 10)


def lstm(large: bool) -> Case:
    inputs, x, data = _tokens(128 if large else 24, 1000, 512 if large else 32, mask=False)
    for _ in range(2):
        x = layers.LSTM(512 if large else 48, return_sequences=True)(x)
    outputs = layers.Dense(10)(layers.GlobalAveragePooling1D()(x))
    return Case(_compiled(inputs, outputs, "lstm"), 1024 if large else 128, data, 10)


def mlp(large: bool) -> Case:
    inputs = x = keras.Input((256,))
    for _ in range(12):
        x = layers.LayerNormalization()(layers.Dense(4096 if large else 256, activation="gelu")(x))
    return Case(_compiled(inputs, layers.Dense(10)(x), "mlp"), 16384 if large else 1024, [((256,), "float32", 0)], 10)


def shared_layers(large: bool) -> Case:
    inputs = keras.Input((64, 32))
    x = layers.Dense(512 if large else 64)(inputs)
    block = keras.Sequential(
        [layers.LayerNormalization(), layers.Dense(x.shape[-1], activation="gelu")], name="shared_block"
    )
    for _ in range(8):
        x = layers.Add()([x, block(x)])
    outputs = layers.Dense(10)(layers.GlobalAveragePooling1D()(x))
    return Case(_compiled(inputs, outputs, "shared_layers"), 512 if large else 64, [((64, 32), "float32", 0)], 10)


def nested_backbone(large: bool) -> Case:
    image, data = _image(64 if large else 24)
    x = image
    for stage in range(3):
        x = _conv(x, (64 if large else 16) << stage, layers.BatchNormalization, 1 if not stage else 2)
        x = _conv(x, (64 if large else 16) << stage, layers.BatchNormalization)
    backbone = keras.Model(image, x, name="backbone")
    inputs = keras.Input(image.shape[1:])
    outputs = layers.Dense(10)(layers.Dropout(0.2)(layers.GlobalAveragePooling2D()(backbone(inputs))))
    return Case(_compiled(inputs, outputs, "nested_backbone"), 256 if large else 128, data, 10)


def two_inputs(large: bool) -> Case:
    words, x, data = _tokens(128 if large else 32, 1000, 256 if large else 48, mask=False)
    image, more = _image(64 if large else 16)
    for _ in range(3):
        x = _block(x, 4)
    y = image
    for _ in range(4):
        y = _conv(y, 64 if large else 16, layers.LayerNormalization)
    both = layers.Concatenate()([layers.GlobalAveragePooling1D()(x), layers.GlobalAveragePooling2D()(y)])
    return Case(_compiled([words, image], layers.Dense(10)(both), "two_inputs"), 64, data + more, 10)


def generator(large: bool) -> Case:
    inputs = keras.Input((64,))
    width = 128 if large else 16
    x = layers.Reshape((4, 4, 4 * width))(layers.Dense(64 * width)(inputs))
    for stage in range(4 if large else 3):
        x = layers.Conv2DTranspose(max(8, 2 * width >> stage), 4, 2, padding="same")(x)
        x = layers.LeakyReLU()(layers.BatchNormalization()(x))
    outputs = layers.Dense(10)(layers.GlobalAveragePooling2D()(layers.Conv2D(3, 3, padding="same")(x)))
    return Case(_compiled(inputs, outputs, "generator"), 256 if large else 128, [((64,), "float32", 0)], 10)


ZOO: dict[str, Callable[[bool], Case]] = {
    make.__name__: make
    for make in (
        plain_cnn,
        residual_batchnorm,
        depthwise,
        unet,
        inception,
        encoder,
        decoder,
        vision_transformer,
        lstm,
        mlp,
        shared_layers,
        nested_backbone,
        two_inputs,
        generator,
    )
}
