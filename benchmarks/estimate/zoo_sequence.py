"""Nets of attention, recurrence and dense layers: text, time series, tables."""

from __future__ import annotations

from typing import Any

import keras
from keras import layers, ops

from zoo import Built, Data, Spec, builds, classification, classifier, scaled


class Positions(layers.Layer):  # type: ignore[misc]  # Keras is seen as untyped.
    """Adds a learned vector for each position."""

    def build(self, shape: tuple[int | None, ...]) -> None:
        self.vectors = self.add_weight(shape=shape[1:], initializer="random_normal", name="vectors")

    def call(self, inputs: Any) -> Any:
        return inputs + ops.cast(self.vectors, inputs.dtype)


def block_after(x: Any, width: int, heads: int) -> Any:
    """Attention and a dense pair, each normalised after its residual."""
    x = layers.LayerNormalization()(layers.Add()([x, layers.MultiHeadAttention(heads, width // heads)(x, x)]))
    hidden = layers.Dense(width)(layers.Dense(4 * width, activation="gelu")(x))
    return layers.LayerNormalization()(layers.Add()([x, hidden]))


def block_before(x: Any, width: int, heads: int, causal: bool = False, dropout: float = 0.0) -> Any:
    """Attention and a dense pair, each normalised before, with dropout on the attention and the result."""
    y = layers.LayerNormalization()(x)
    x = layers.Add()(
        [x, layers.MultiHeadAttention(heads, width // heads, dropout=dropout)(y, y, use_causal_mask=causal)]
    )
    y = layers.Dense(4 * width, activation="gelu")(layers.LayerNormalization()(x))
    return layers.Add()([x, layers.Dropout(dropout)(layers.Dense(width)(y))])


def tokens(steps: int, words: int, width: int) -> tuple[Any, Any, Spec]:
    inputs = keras.Input((steps,), dtype="int32")
    return inputs, layers.Embedding(words, width)(inputs), Spec((steps,), "int32", words)


@builds
def encoder(scale: float) -> Built:
    """Six layers of width 512 over 512 tokens, a word predicted for each."""
    steps, width, words = scaled(512, scale), 512, 1000
    inputs, x, spec = tokens(steps, words, width)
    for _ in range(6):
        x = block_after(x, width, 8)
    return Built(keras.Model(inputs, layers.Dense(words)(x)), classification(), Data(spec, spec))


@builds
def encoder_small(scale: float) -> Built:
    """A text classifier: two layers, dropout, one label a text."""
    steps, width, words = scaled(128, scale), 128, 20000
    inputs, x, spec = tokens(steps, words, width)
    x = Positions()(x)
    for _ in range(2):
        x = block_before(x, width, 4, dropout=0.1)
    x = layers.Dense(2)(layers.GlobalAveragePooling1D()(layers.LayerNormalization()(x)))
    return classifier(inputs, x, spec, 2)


@builds
def decoder(scale: float) -> Built:
    """A language model: causal attention, and logits over 16000 words that outweigh the layers."""
    steps, width, words = scaled(512, scale), 512, 16000
    inputs, x, spec = tokens(steps, words, width)
    x = Positions()(x)
    for _ in range(4):
        x = block_before(x, width, 8, causal=True, dropout=0.1)
    outputs = layers.Dense(words)(layers.LayerNormalization()(x))
    return Built(keras.Model(inputs, outputs), classification(), Data(spec, spec))


def patches(size: int, patch: int, width: int) -> tuple[Any, Any, Spec]:
    inputs = keras.Input((size, size, 3))
    x = layers.Conv2D(width, patch, patch)(layers.Rescaling(2.0, -1.0)(inputs))
    return inputs, Positions()(layers.Reshape((-1, width))(x)), Spec((size, size, 3))


@builds
def vit(scale: float) -> Built:
    inputs, x, spec = patches(scaled(224, scale), 16, 384)
    for _ in range(12):
        x = block_before(x, 384, 6, dropout=0.1)
    x = layers.GlobalAveragePooling1D()(layers.LayerNormalization()(x))
    return classifier(inputs, layers.Dense(1000)(x), spec, 1000)


@builds
def mixer(scale: float) -> Built:
    """Dense layers across patches, then across channels."""
    size, patch, width = scaled(224, scale), 16, 256
    inputs, x, spec = patches(size, patch, width)
    count = (size // patch) ** 2
    for _ in range(8):
        y = layers.Permute((2, 1))(layers.LayerNormalization()(x))
        y = layers.Dense(count)(layers.Dense(384, activation="gelu")(y))
        x = layers.Add()([x, layers.Permute((2, 1))(y)])
        y = layers.Dense(4 * width, activation="gelu")(layers.LayerNormalization()(x))
        x = layers.Add()([x, layers.Dense(width)(y)])
    x = layers.GlobalAveragePooling1D()(layers.LayerNormalization()(x))
    return classifier(inputs, layers.Dense(100)(x), spec, 100)


@builds
def image_text(scale: float) -> Built:
    """Two inputs: an image through convolutions, its caption attending to it."""
    size, steps, width = scaled(128, scale), scaled(64, scale, 16), 256
    image = keras.Input((size, size, 3))
    seen = image
    for channels in (32, 64, 128):
        seen = layers.Conv2D(channels, 3, 2, padding="same", activation="relu")(seen)
    seen = layers.Dense(width)(layers.Reshape((-1, 128))(seen))
    text, x, spec = tokens(steps, 10000, width)
    for _ in range(3):
        x = layers.Add()([x, layers.MultiHeadAttention(4, width // 4)(layers.LayerNormalization()(x), seen)])
        x = block_before(x, width, 4)
    x = layers.Concatenate()([layers.GlobalAveragePooling1D()(x), layers.GlobalMaxPooling1D()(seen)])
    return classifier([image, text], layers.Dense(1000)(x), [Spec((size, size, 3)), spec], 1000)


@builds
def lstm(scale: float) -> Built:
    inputs, x, spec = tokens(scaled(128, scale, 16), 10000, 256)
    x = layers.LSTM(512, return_sequences=True)(x)
    x = layers.LSTM(512, return_sequences=True)(x)
    return Built(
        keras.Model(inputs, layers.Dense(1000)(x)), classification(), Data(spec, Spec(spec.shape, "int32", 1000))
    )


@builds
def gru(scale: float) -> Built:
    """A forecast from 32 series, with dropout between the layers."""
    steps = scaled(256, scale, 16)
    x = inputs = keras.Input((steps, 32))
    x = layers.Dropout(0.2)(layers.GRU(384, return_sequences=True)(x))
    x = layers.Dropout(0.2)(layers.GRU(384, return_sequences=True)(x))
    outputs = layers.Dense(32)(layers.GRU(256)(x))
    return Built(keras.Model(inputs, outputs), "mse", Data(Spec((steps, 32)), Spec((32,))))


@builds
def bidirectional(scale: float) -> Built:
    """A tagger: both directions, and a label a token."""
    inputs, x, spec = tokens(scaled(128, scale, 16), 20000, 200)
    for width in (256, 256):
        x = layers.Bidirectional(layers.LSTM(width, return_sequences=True))(x)
    outputs = layers.Dense(50)(layers.Dropout(0.3)(x))
    return Built(keras.Model(inputs, outputs), classification(), Data(spec, Spec(spec.shape, "int32", 50)))


@builds
def convlstm(scale: float) -> Built:
    """The next frame of a film."""
    frames, size = 10, scaled(64, scale, 16)
    x = inputs = keras.Input((frames, size, size, 1))
    for sequences in (True, False):
        x = layers.ConvLSTM2D(32, 3, padding="same", return_sequences=sequences)(x)
        x = layers.BatchNormalization()(x)
    outputs = layers.Conv2D(1, 3, padding="same", activation="sigmoid")(x)
    data = Data(Spec((frames, size, size, 1)), Spec((size, size, 1)))
    return Built(keras.Model(inputs, outputs), "binary_crossentropy", data)


@builds
def mlp(scale: float) -> Built:
    """Layers of 2048 over a table of 512 columns."""
    x = inputs = keras.Input((512,))
    for _ in range(6):
        x = layers.Dense(scaled(2048, scale), use_bias=False)(x)
        x = layers.Dropout(0.1)(layers.Activation("silu")(layers.BatchNormalization()(x)))
    return Built(keras.Model(inputs, layers.Dense(1)(x)), "mse", Data(Spec((512,)), Spec((1,))))


@builds
def recommender(scale: float) -> Built:
    """Huge tables of embeddings, of which a batch needs few rows, and a small net over them."""
    sizes = [scaled(size, scale) for size in (2_000_000, 400_000, 10_000)]
    inputs = [keras.Input((), dtype="int32") for _ in sizes]
    features = [layers.Embedding(size, 64)(x) for size, x in zip(sizes, inputs, strict=True)]
    crossed = layers.Multiply()(features[:2])
    x = layers.Concatenate()([*features, crossed])
    for width in (1024, 512, 256):
        x = layers.Dense(width, activation="relu")(x)
    outputs = layers.Dense(1, activation="sigmoid")(x)
    data = Data([Spec((), "int32", size) for size in sizes], Spec((1,)))
    return Built(keras.Model(inputs, outputs), "binary_crossentropy", data)
