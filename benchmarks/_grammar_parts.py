"""What the random models of `_grammar.py` are made of: the choices of one model, and what families share."""

from __future__ import annotations

import random
from typing import Any, NamedTuple

import keras
from keras import layers

Data = list[tuple[tuple[Any, ...], str, int]]


class Parts(NamedTuple):
    """A model before it is compiled: the heads have what a target looks like, and a loss."""

    inputs: list[Any]
    heads: list[tuple[Any, tuple[tuple[int, ...], str, int], Any]]
    data: Data


class Draw:
    """The choices of one model, on a small device or on a large one."""

    def __init__(self, seed: int, number: int, device: str) -> None:
        self.random = random.Random(f"{seed}/{number}")
        self.large = device == "gpu"
        self.device = device
        self.norm = self.random.choice(("batch", "batch", "layer", "layer", "group", "rms", "none"))
        self.activation = self.random.choice(("relu", "gelu", "swish", "leaky_relu", "elu"))
        self.dropout = self.random.choice((0.0, 0.0, 0.1, 0.3))

    def of(self, small: tuple[Any, ...], large: tuple[Any, ...]) -> Any:
        return self.random.choice(large if self.large else small)

    def normed(self, x: Any, kinds: tuple[str, ...] = ()) -> Any:
        kind = self.norm if not kinds or self.norm in kinds else kinds[0]
        if kind == "batch":
            return layers.BatchNormalization()(x)
        if kind == "layer":
            return layers.LayerNormalization()(x)
        if kind == "rms":
            return layers.RMSNormalization()(x)
        if kind == "group":
            groups = next(number for number in (8, 4, 2, 1) if x.shape[-1] % number == 0)
            return layers.GroupNormalization(groups)(x)
        return x

    def active(self, x: Any) -> Any:
        return layers.Activation(self.activation)(x)

    def dropped(self, x: Any) -> Any:
        return layers.Dropout(self.dropout)(x) if self.dropout else x

    def image(self, small: tuple[int, ...], large: tuple[int, ...]) -> tuple[Any, Data]:
        size, channels = self.of(small, large), self.random.choice((1, 3, 3, 4))
        return keras.Input((size, size, channels)), [((size, size, channels), "float32", 0)]

    def tokens(self, small: tuple[int, ...], large: tuple[int, ...], words: int) -> tuple[Any, Data]:
        length = self.of(small, large)
        return keras.Input((length,), dtype="int32"), [((length,), "int32", words)]


def classes(count: int) -> tuple[tuple[tuple[int, ...], str, int], Any]:
    return ((1,), "int64", count), keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def labels(shape: tuple[int, ...], count: int) -> tuple[tuple[tuple[int, ...], str, int], Any]:
    return (shape, "int64", count), keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def numbers(shape: tuple[int, ...], loss: str = "mse") -> tuple[tuple[tuple[int, ...], str, int], Any]:
    return (shape, "float32", 0), loss


def classifier(draw: Draw, inputs: Any, x: Any, data: Data) -> Parts:
    """Features of any rank, brought together in one of three ways, and classes."""
    if len(x.shape) == 2:
        pooled = x
    elif draw.random.random() < 0.75:
        pooled = layers.GlobalAveragePooling1D()(layers.Reshape((-1, x.shape[-1]))(x))
    else:
        pooled = layers.Flatten()(layers.Dense(4)(x))
    count = draw.random.choice((2, 10, 100))
    return Parts([inputs], [(layers.Dense(count)(draw.dropped(pooled)), *classes(count))], data)


def conv(draw: Draw, x: Any, width: int, size: int = 3, stride: int = 1, dilation: int = 1) -> Any:
    made = layers.Conv2D(width, size, stride, padding="same", dilation_rate=dilation, use_bias=draw.norm == "none")
    return draw.active(draw.normed(made(x)))


def block(draw: Draw, x: Any, heads: int, causal: bool = False, memory: Any = None) -> Any:
    """A transformer block that normalises before or after, as the model does."""
    width, kinds = x.shape[-1], ("layer", "rms")
    y = draw.normed(x, kinds)
    x = x + draw.dropped(layers.MultiHeadAttention(heads, width // heads)(y, y, use_causal_mask=causal))
    if memory is not None:
        x = x + layers.MultiHeadAttention(heads, width // heads)(draw.normed(x, kinds), memory)
    y = draw.normed(x, kinds)
    y = layers.Dense(draw.random.choice((2, 4)) * width, activation=draw.activation)(y)
    return x + draw.dropped(layers.Dense(width)(y))
