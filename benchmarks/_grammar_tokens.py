"""Families of random models that read tokens, patches and tables."""

from __future__ import annotations

from typing import Any

import keras
from keras import layers, ops

from _grammar_parts import Data, Draw, Parts, block, classes, classifier, conv, labels, numbers


def recurrent(draw: Draw) -> Parts:
    words, mask = 2000, draw.random.random() < 0.3
    inputs, data = draw.tokens((16, 24, 32), (64, 128, 200), words)
    width, kind = draw.of((24, 32, 48), (256, 384, 512)), draw.random.choice((layers.LSTM, layers.GRU))
    x = layers.Embedding(words, width, mask_zero=mask)(inputs)
    for _ in range(draw.random.randint(1, 3)):
        cell = kind(width, return_sequences=True)
        x = layers.Bidirectional(cell)(x) if draw.random.random() < 0.4 else cell(x)
    if draw.random.random() < 0.5:
        return Parts([inputs], [(layers.Dense(20)(x), *labels((inputs.shape[1],), 20))], data)
    pooled = layers.GlobalMaxPooling1D()(x)
    return Parts([inputs], [(layers.Dense(2)(draw.dropped(pooled)), *classes(2))], data)


def encoder(draw: Draw) -> Parts:
    words = draw.random.choice((1000, 5000))
    inputs, data = draw.tokens((24, 32, 48), (128, 256, 384), words)
    width = draw.of((32, 48, 64), (256, 384, 512))
    x = layers.Embedding(words, width, mask_zero=draw.random.random() < 0.4)(inputs)
    for _ in range(draw.random.randint(2, 6)):
        x = block(draw, x, 4)
    return Parts([inputs], [(layers.Dense(10)(layers.GlobalAveragePooling1D()(x)), *classes(10))], data)


class _Positions(layers.Layer):  # type: ignore[misc]
    """Adds what is learnt for each position, looked up as every Keras transformer does it."""

    def build(self, shape: Any) -> None:
        self.table = layers.Embedding(shape[1], shape[2])
        self.table.build((shape[1],))

    def call(self, x: Any) -> Any:
        return x + self.table(ops.arange(x.shape[1]))


def language_model(draw: Draw) -> Parts:
    words = draw.of((1000, 2000, 4000), (16000, 32000, 50000))
    inputs, data = draw.tokens((24, 32, 48), (128, 256, 512), words)
    width, length = draw.of((32, 48, 64), (256, 384, 512)), inputs.shape[1]
    table = layers.ReversibleEmbedding(words, width) if draw.random.random() < 0.5 else layers.Embedding(words, width)
    x = _Positions()(table(inputs))
    for _ in range(draw.random.randint(2, 5)):
        x = block(draw, x, 4, causal=True)
    x = draw.normed(x, ("layer", "rms"))
    head = table(x, reverse=True) if isinstance(table, layers.ReversibleEmbedding) else layers.Dense(words)(x)
    return Parts([inputs], [(head, *labels((length,), words))], data)


def translation(draw: Draw) -> Parts:
    words = draw.of((500, 1500), (8000, 16000))
    source, first = draw.tokens((24, 32), (128, 192), words)
    target, second = draw.tokens((16, 24), (96, 128), words)
    width = draw.of((32, 48), (256, 384))
    memory, x = layers.Embedding(words, width)(source), layers.Embedding(words, width)(target)
    for _ in range(draw.random.randint(1, 3)):
        memory = block(draw, memory, 4)
    for _ in range(draw.random.randint(1, 3)):
        x = block(draw, x, 4, causal=True, memory=memory)
    return Parts([source, target], [(layers.Dense(words)(x), *labels((target.shape[1],), words))], first + second)


def _patches(draw: Draw) -> tuple[Any, Any, Data]:
    inputs, data = draw.image((32, 48), (128, 160, 224))
    patch, width = draw.of((4, 8), (8, 16)), draw.of((32, 48), (256, 384))
    x = layers.Reshape((-1, width))(layers.Conv2D(width, patch, patch)(inputs))
    return inputs, x, data


def vision_transformer(draw: Draw) -> Parts:
    inputs, x, data = _patches(draw)
    x = _Positions()(x)
    for _ in range(draw.random.randint(3, 6)):
        x = block(draw, x, 4)
    return classifier(draw, inputs, x, data)


def windows(draw: Draw) -> Parts:
    """Attention within windows of 7 × 7 or 4 × 4 positions, as in Swin, every other block shifted."""
    side = draw.random.choice((4, 7))
    size = 4 * side * draw.of((1, 2), (2, 4))
    inputs, data = keras.Input((size, size, 3)), [((size, size, 3), "float32", 0)]
    width, across = draw.of((32, 48), (96, 128)), size // 4 // side
    x = layers.Conv2D(width, 4, 4)(inputs)
    for number in range(draw.random.randint(2, 4)):
        shift = side // 2 if number % 2 and across > 1 else 0
        y = (
            ops.roll(draw.normed(x, ("layer", "rms")), (-shift, -shift), (1, 2))
            if shift
            else draw.normed(x, ("layer",))
        )
        y = ops.reshape(y, (-1, across, side, across, side, width))
        y = ops.reshape(ops.transpose(y, (0, 1, 3, 2, 4, 5)), (-1, side * side, width))
        y = layers.MultiHeadAttention(4, width // 4)(y, y)
        y = ops.reshape(y, (-1, across, across, side, side, width))
        y = ops.reshape(ops.transpose(y, (0, 1, 3, 2, 4, 5)), (-1, across * side, across * side, width))
        x = x + (ops.roll(y, (shift, shift), (1, 2)) if shift else y)
        y = layers.Dense(4 * width, activation=draw.activation)(draw.normed(x, ("layer", "rms")))
        x = x + draw.dropped(layers.Dense(width)(y))
    return classifier(draw, inputs, x, data)


class _Encoder(layers.Layer):  # type: ignore[misc]
    """All blocks in one layer, as many published vision transformers have it."""

    def __init__(self, depth: int, width: int, activation: str) -> None:
        super().__init__()
        self.norms = [layers.LayerNormalization() for _ in range(2 * depth)]
        self.attention = [layers.MultiHeadAttention(4, width // 4) for _ in range(depth)]
        self.wide = [layers.Dense(4 * width, activation=activation) for _ in range(depth)]
        self.narrow = [layers.Dense(width) for _ in range(depth)]

    def build(self, shape: Any) -> None:
        for number, attention in enumerate(self.attention):
            self.norms[2 * number].build(shape)
            self.norms[2 * number + 1].build(shape)
            attention.build(shape, shape)
            self.wide[number].build(shape)
            self.narrow[number].build((*shape[:-1], self.wide[number].units))

    def call(self, x: Any) -> Any:
        for number, attention in enumerate(self.attention):
            y = self.norms[2 * number](x)
            x = x + attention(y, y)
            x = x + self.narrow[number](self.wide[number](self.norms[2 * number + 1](x)))
        return x


def one_layer(draw: Draw) -> Parts:
    inputs, x, data = _patches(draw)
    x = _Encoder(draw.random.randint(3, 6), x.shape[-1], draw.activation)(x)
    return classifier(draw, inputs, x, data)


def mixer(draw: Draw) -> Parts:
    inputs, x, data = _patches(draw)
    for _ in range(draw.random.randint(3, 6)):
        y = layers.Permute((2, 1))(draw.normed(x, ("layer",)))
        y = layers.Dense(x.shape[1])(layers.Dense(2 * x.shape[1], activation=draw.activation)(y))
        x = layers.Add()([x, layers.Permute((2, 1))(y)])
        y = layers.Dense(4 * x.shape[-1], activation=draw.activation)(draw.normed(x, ("layer",)))
        x = layers.Add()([x, draw.dropped(layers.Dense(x.shape[-1])(y))])
    return classifier(draw, inputs, x, data)


def recommender(draw: Draw) -> Parts:
    """Tables of embeddings that outweigh the rest, and a small tower."""
    rows, width = draw.of((5000, 20000), (500_000, 1_000_000)), draw.random.choice((16, 32))
    fields = draw.random.randint(3, 6)
    inputs = [keras.Input((draw.random.choice((1, 4, 8)),), dtype="int32") for _ in range(fields)]
    pooled = [layers.GlobalAveragePooling1D()(layers.Embedding(rows, width)(each)) for each in inputs]
    numbers = keras.Input((13,))
    x = layers.Concatenate()([*pooled, layers.Dense(width, activation="relu")(numbers)])
    for units in draw.of(((128, 64), (256, 128, 64)), ((1024, 512), (1024, 512, 256))):
        x = draw.dropped(draw.active(draw.normed(layers.Dense(units)(x), ("batch", "layer", "none"))))
    data: Data = [((each.shape[1],), "int32", rows) for each in inputs]
    head = layers.Dense(1)(x)
    loss = keras.losses.BinaryCrossentropy(from_logits=True)
    return Parts([*inputs, numbers], [(head, ((1,), "float32", 2), loss)], [*data, ((13,), "float32", 0)])


def several(draw: Draw) -> Parts:
    """An image and a text in, a class and a box out."""
    image, first = draw.image((16, 24), (64, 96))
    words, second = draw.tokens((16, 24), (64, 128), 2000)
    y = image
    for width in draw.of(((12, 24), (16, 16, 32)), ((48, 96, 96), (64, 64, 128))):
        y = layers.MaxPooling2D()(conv(draw, y, width))
    width = draw.of((32, 48), (192, 256))
    x = layers.Embedding(2000, width)(words)
    for _ in range(2):
        x = block(draw, x, 4)
    both = [layers.GlobalAveragePooling2D()(y), layers.GlobalAveragePooling1D()(x)]
    joint = layers.Dense(2 * width, activation=draw.activation)(layers.Concatenate()(both))
    heads = [(layers.Dense(20)(joint), *classes(20)), (layers.Dense(4)(joint), *numbers((4,), "huber"))]
    return Parts([image, words], heads, first + second)


def tabular(draw: Draw) -> Parts:
    inputs = x = keras.Input((draw.random.choice((64, 200)),))
    width = draw.of((128, 256), (2048, 4096))
    for _ in range(draw.random.randint(4, 10)):
        y = draw.dropped(draw.active(draw.normed(layers.Dense(width)(x), ("batch", "layer", "rms", "none"))))
        x = layers.Add()([x, y]) if x.shape[-1] == width else y
    return classifier(draw, inputs, x, [((inputs.shape[1],), "float32", 0)])
