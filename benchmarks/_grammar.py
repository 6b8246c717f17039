"""Random models that nobody tuned for: sensible architectures, each drawn from a seed and a number.

Twenty families take turns, so that twenty models in a row have one of each. Depth, width, sizes, normalisation,
activation, dropout, precision, optimizer and batch are drawn. The batch is as large as the layers' outputs, counted by
hand, let the step be: no estimate of ours has a say.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any, NamedTuple

import keras
from keras import layers, ops

from _plan_zoo import Case

# What the outputs of all layers and their gradients are to take, and the largest batch.
_BYTES = {"cpu": (40 * 2**20, 160 * 2**20), "gpu": (1536 * 2**20, 5 * 2**30)}
_BATCHES = (2, 3, 4, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64, 80, 96, 100, 128, 192, 200, 256, 384, 500, 512, 1000)
_LARGE_BATCHES = (1024, 2048, 4096, 8192)
_MOST = {"cpu": 1024, "gpu": 8192}

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


def case(seed: int, number: int, device: str) -> Case:
    """Model `number` of a seed, compiled, with the batch it is asked for."""
    draw = Draw(seed, number, device)
    order = list(FAMILIES)
    random.Random(f"{seed}/{number // len(order)}").shuffle(order)
    family = order[number % len(order)]
    precision = draw.random.choice(("float32",) * 4 + ("mixed_bfloat16", "mixed_float16"))
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(precision)
    try:
        parts = FAMILIES[family](draw)
        outputs = [layers.Activation("linear", dtype="float32")(head) for head, *_ in parts.heads]
    finally:
        keras.config.set_dtype_policy(before)
    name = f"{family}_{seed}_{number}"
    model = keras.Model(parts.inputs, outputs if len(outputs) > 1 else outputs[0], name=name)
    losses = [loss for *_, loss in parts.heads]
    model.compile(_optimizer(draw), losses if len(losses) > 1 else losses[0])
    batch = _batch(draw, model)
    return Case(model, batch, parts.data, 0, tuple(target for _, target, _ in parts.heads))


def described(made: Case) -> dict[str, Any]:
    """What a reader of results wants to know of a model."""
    optimizer = made.model.optimizer
    return {
        "optimizer": type(getattr(optimizer, "inner_optimizer", optimizer)).__name__,
        "precision": sorted({layer.dtype_policy.name for layer in made.model._flatten_layers(include_self=False)}),
        "normalisation": sorted(
            {type(layer).__name__ for layer in made.model._flatten_layers() if "Normalization" in type(layer).__name__}
        ),
        "batch": made.batch,
        "parameters": made.model.count_params(),
    }


def _batch(draw: Draw, model: Any) -> int:
    low, high = _BYTES[draw.device]
    wanted = math.exp(draw.random.uniform(math.log(low), math.log(high)))
    each = 2 * sum(_bytes(tensor) for tensor in _tensors(model))
    fitting = [batch for batch in (*_BATCHES, *_LARGE_BATCHES) if batch <= _MOST[draw.device]]
    return min(fitting, key=lambda batch: abs(math.log(batch * each / wanted)))


def _tensors(model: Any) -> list[Any]:
    return [
        tensor
        for layer in model.layers
        for node in layer._inbound_nodes
        for tensor in node.outputs
        if not isinstance(layer, keras.Model)
    ]


def _bytes(tensor: Any) -> int:
    item = 2 if "16" in str(tensor.dtype) else 4
    return int(item * math.prod(size or 1 for size in tensor.shape))


def _optimizer(draw: Draw) -> Any:
    made = keras.optimizers
    kinds: tuple[Callable[[], Any], ...] = (
        lambda: made.Adam(1e-4),
        lambda: made.Adam(1e-4, clipnorm=1.0),
        lambda: made.AdamW(1e-4, weight_decay=0.01),
        lambda: made.SGD(1e-3),
        lambda: made.SGD(1e-3, momentum=0.9, nesterov=True),
        lambda: made.RMSprop(1e-4),
        lambda: made.Lion(1e-5),
        lambda: made.Adafactor(1e-4),
        lambda: made.Nadam(1e-4),
    )
    return draw.random.choice(kinds)()


def _classes(count: int) -> tuple[tuple[tuple[int, ...], str, int], Any]:
    return ((1,), "int64", count), keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def _labels(shape: tuple[int, ...], count: int) -> tuple[tuple[tuple[int, ...], str, int], Any]:
    return (shape, "int64", count), keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def _numbers(shape: tuple[int, ...], loss: str = "mse") -> tuple[tuple[tuple[int, ...], str, int], Any]:
    return (shape, "float32", 0), loss


def _classifier(draw: Draw, inputs: Any, x: Any, data: Data) -> Parts:
    """Features of any rank, brought together in one of three ways, and classes."""
    if len(x.shape) == 2:
        pooled = x
    elif draw.random.random() < 0.75:
        pooled = layers.GlobalAveragePooling1D()(layers.Reshape((-1, x.shape[-1]))(x))
    else:
        pooled = layers.Flatten()(layers.Dense(4)(x))
    count = draw.random.choice((2, 10, 100))
    return Parts([inputs], [(layers.Dense(count)(draw.dropped(pooled)), *_classes(count))], data)


def _conv(draw: Draw, x: Any, width: int, size: int = 3, stride: int = 1, dilation: int = 1) -> Any:
    made = layers.Conv2D(width, size, stride, padding="same", dilation_rate=dilation, use_bias=draw.norm == "none")
    return draw.active(draw.normed(made(x)))


# The families


def plain_conv(draw: Draw) -> Parts:
    inputs, data = draw.image((20, 28, 32), (64, 96, 128))
    x, width = inputs, draw.of((8, 12, 16), (32, 48, 64))
    for stage in range(draw.random.randint(2, 4)):
        for _ in range(draw.random.randint(1, 3)):
            x = _conv(draw, x, width << stage, draw.random.choice((3, 3, 5)))
        x = layers.MaxPooling2D()(x) if draw.random.random() < 0.6 else layers.AveragePooling2D(2)(x)
    return _classifier(draw, inputs, x, data)


def residual(draw: Draw) -> Parts:
    inputs, data = draw.image((20, 24, 32), (64, 96, 112))
    bottleneck, first = draw.random.random() < 0.5, draw.of((12, 16), (32, 64))
    x = _conv(draw, inputs, first)
    for stage in range(3):
        for block in range(draw.random.randint(1, 3)):
            stride, width = (2 if stage and not block else 1), first << stage
            y = _conv(draw, x, width // 2, 1) if bottleneck else x
            y = _conv(draw, y, width // 2 if bottleneck else width, 3, stride)
            y = draw.normed(layers.Conv2D(width, 1 if bottleneck else 3, padding="same")(y))
            short = x if stride == 1 and x.shape[-1] == width else layers.Conv2D(width, 1, stride)(x)
            x = draw.active(layers.Add()([short, y]))
    return _classifier(draw, inputs, x, data)


def separable(draw: Draw) -> Parts:
    inputs, data = draw.image((24, 32), (96, 128, 160))
    x, excite = _conv(draw, inputs, draw.of((8, 16), (24, 32)), 3, 2), draw.random.random() < 0.5
    for width in draw.of(((12, 16, 24), (16, 32)), ((32, 48, 96), (48, 64, 96, 128))):
        y = _conv(draw, x, draw.random.choice((3, 4, 6)) * x.shape[-1], 1)
        y = draw.active(draw.normed(layers.DepthwiseConv2D(draw.random.choice((3, 5)), padding="same")(y)))
        if excite:
            squeezed = layers.GlobalAveragePooling2D(keepdims=True)(y)
            gate = layers.Dense(y.shape[-1], activation="sigmoid")(layers.Dense(8, activation="relu")(squeezed))
            y = layers.Multiply()([y, gate])
        y = draw.normed(layers.Conv2D(width, 1)(y))
        x = layers.Add()([x, y]) if x.shape[-1] == width else y
    return _classifier(draw, inputs, x, data)


def unet(draw: Draw) -> Parts:
    inputs, data = draw.image((32, 48), (128, 192, 256))
    width, depth, x, skips = draw.of((6, 8, 12), (16, 24, 32)), draw.random.randint(2, 4), inputs, []
    for level in range(depth):
        x = _conv(draw, _conv(draw, x, width << level), width << level)
        skips.append(x)
        x = layers.MaxPooling2D()(x)
    x = _conv(draw, x, width << depth)
    upsample = draw.random.random() < 0.5
    for level in reversed(range(depth)):
        x = layers.UpSampling2D()(x) if upsample else layers.Conv2DTranspose(width << level, 2, 2)(x)
        x = _conv(draw, layers.Concatenate()([x, skips[level]]), width << level)
    count, size = draw.random.choice((2, 5, 20)), inputs.shape[1]
    return Parts([inputs], [(layers.Conv2D(count, 1)(x), *_labels((size, size), count))], data)


def dilated(draw: Draw) -> Parts:
    inputs, data = draw.image((24, 32), (96, 128))
    x = _conv(draw, inputs, draw.of((12, 16), (48, 64)))
    for rate in draw.random.choice(((1, 2, 4), (1, 2, 4, 8), (2, 4, 2, 1))):
        x = layers.Add()([x, _conv(draw, x, x.shape[-1], 3, 1, rate)])
    branches = [_conv(draw, x, x.shape[-1] // 2, 3, 1, rate) for rate in (1, 3, 6)]
    x = layers.Conv2D(x.shape[-1], 1)(layers.Concatenate()(branches))
    size = inputs.shape[1]
    return Parts([inputs], [(layers.Conv2D(4, 1)(x), *_labels((size, size), 4))], data)


def sequence_conv(draw: Draw) -> Parts:
    length, channels = draw.of((128, 256), (2048, 4096)), draw.random.choice((1, 4, 12))
    inputs = keras.Input((length, channels))
    width = draw.of((12, 16, 24), (48, 64, 96))
    x = layers.Conv1D(width, 7, padding="same")(inputs)
    for level in range(draw.random.randint(4, 8)):
        y = layers.Conv1D(2 * width, 3, padding="causal", dilation_rate=2**level)(x)
        gate, value = y[..., :width], y[..., width:]
        y = layers.Multiply()([layers.Activation("tanh")(value), layers.Activation("sigmoid")(gate)])
        x = layers.Add()([x, draw.normed(layers.Conv1D(width, 1)(y))])
    if draw.random.random() < 0.5:
        head = layers.Conv1D(3, 1)(draw.active(x))
        return Parts([inputs], [(head, *_numbers((length, 3), "mae"))], [((length, channels), "float32", 0)])
    return _classifier(draw, inputs, x, [((length, channels), "float32", 0)])


def volumes(draw: Draw) -> Parts:
    size = draw.of((10, 12), (32, 40))
    inputs = keras.Input((size, size, size, 1))
    x, width = inputs, draw.of((6, 8), (16, 24))
    for stage in range(2):
        for _ in range(draw.random.randint(1, 2)):
            x = draw.active(draw.normed(layers.Conv3D(width << stage, 3, padding="same")(x)))
        x = layers.MaxPooling3D()(x)
    return _classifier(draw, inputs, x, [((size, size, size, 1), "float32", 0)])


def recurrent(draw: Draw) -> Parts:
    words, mask = 2000, draw.random.random() < 0.3
    inputs, data = draw.tokens((16, 24, 32), (64, 128, 200), words)
    width, kind = draw.of((24, 32, 48), (256, 384, 512)), draw.random.choice((layers.LSTM, layers.GRU))
    x = layers.Embedding(words, width, mask_zero=mask)(inputs)
    for _ in range(draw.random.randint(1, 3)):
        cell = kind(width, return_sequences=True)
        x = layers.Bidirectional(cell)(x) if draw.random.random() < 0.4 else cell(x)
    if draw.random.random() < 0.5:
        return Parts([inputs], [(layers.Dense(20)(x), *_labels((inputs.shape[1],), 20))], data)
    pooled = layers.GlobalMaxPooling1D()(x)
    return Parts([inputs], [(layers.Dense(2)(draw.dropped(pooled)), *_classes(2))], data)


def _block(draw: Draw, x: Any, heads: int, causal: bool = False, memory: Any = None) -> Any:
    """A transformer block that normalises before or after, as the model does."""
    width, kinds = x.shape[-1], ("layer", "rms")
    y = draw.normed(x, kinds)
    x = x + draw.dropped(layers.MultiHeadAttention(heads, width // heads)(y, y, use_causal_mask=causal))
    if memory is not None:
        x = x + layers.MultiHeadAttention(heads, width // heads)(draw.normed(x, kinds), memory)
    y = draw.normed(x, kinds)
    y = layers.Dense(draw.random.choice((2, 4)) * width, activation=draw.activation)(y)
    return x + draw.dropped(layers.Dense(width)(y))


def encoder(draw: Draw) -> Parts:
    words = draw.random.choice((1000, 5000))
    inputs, data = draw.tokens((24, 32, 48), (128, 256, 384), words)
    width = draw.of((32, 48, 64), (256, 384, 512))
    x = layers.Embedding(words, width, mask_zero=draw.random.random() < 0.4)(inputs)
    for _ in range(draw.random.randint(2, 6)):
        x = _block(draw, x, 4)
    return Parts([inputs], [(layers.Dense(10)(layers.GlobalAveragePooling1D()(x)), *_classes(10))], data)


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
        x = _block(draw, x, 4, causal=True)
    x = draw.normed(x, ("layer", "rms"))
    head = table(x, reverse=True) if isinstance(table, layers.ReversibleEmbedding) else layers.Dense(words)(x)
    return Parts([inputs], [(head, *_labels((length,), words))], data)


def translation(draw: Draw) -> Parts:
    words = draw.of((500, 1500), (8000, 16000))
    source, first = draw.tokens((24, 32), (128, 192), words)
    target, second = draw.tokens((16, 24), (96, 128), words)
    width = draw.of((32, 48), (256, 384))
    memory, x = layers.Embedding(words, width)(source), layers.Embedding(words, width)(target)
    for _ in range(draw.random.randint(1, 3)):
        memory = _block(draw, memory, 4)
    for _ in range(draw.random.randint(1, 3)):
        x = _block(draw, x, 4, causal=True, memory=memory)
    return Parts([source, target], [(layers.Dense(words)(x), *_labels((target.shape[1],), words))], first + second)


def _patches(draw: Draw) -> tuple[Any, Any, Data]:
    inputs, data = draw.image((32, 48), (128, 160, 224))
    patch, width = draw.of((4, 8), (8, 16)), draw.of((32, 48), (256, 384))
    x = layers.Reshape((-1, width))(layers.Conv2D(width, patch, patch)(inputs))
    return inputs, x, data


def vision_transformer(draw: Draw) -> Parts:
    inputs, x, data = _patches(draw)
    x = _Positions()(x)
    for _ in range(draw.random.randint(3, 6)):
        x = _block(draw, x, 4)
    return _classifier(draw, inputs, x, data)


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
    return _classifier(draw, inputs, x, data)


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
    return _classifier(draw, inputs, x, data)


def mixer(draw: Draw) -> Parts:
    inputs, x, data = _patches(draw)
    for _ in range(draw.random.randint(3, 6)):
        y = layers.Permute((2, 1))(draw.normed(x, ("layer",)))
        y = layers.Dense(x.shape[1])(layers.Dense(2 * x.shape[1], activation=draw.activation)(y))
        x = layers.Add()([x, layers.Permute((2, 1))(y)])
        y = layers.Dense(4 * x.shape[-1], activation=draw.activation)(draw.normed(x, ("layer",)))
        x = layers.Add()([x, draw.dropped(layers.Dense(x.shape[-1])(y))])
    return _classifier(draw, inputs, x, data)


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
        y = layers.MaxPooling2D()(_conv(draw, y, width))
    width = draw.of((32, 48), (192, 256))
    x = layers.Embedding(2000, width)(words)
    for _ in range(2):
        x = _block(draw, x, 4)
    both = [layers.GlobalAveragePooling2D()(y), layers.GlobalAveragePooling1D()(x)]
    joint = layers.Dense(2 * width, activation=draw.activation)(layers.Concatenate()(both))
    heads = [(layers.Dense(20)(joint), *_classes(20)), (layers.Dense(4)(joint), *_numbers((4,), "huber"))]
    return Parts([image, words], heads, first + second)


def tabular(draw: Draw) -> Parts:
    inputs = x = keras.Input((draw.random.choice((64, 200)),))
    width = draw.of((128, 256), (2048, 4096))
    for _ in range(draw.random.randint(4, 10)):
        y = draw.dropped(draw.active(draw.normed(layers.Dense(width)(x), ("batch", "layer", "rms", "none"))))
        x = layers.Add()([x, y]) if x.shape[-1] == width else y
    return _classifier(draw, inputs, x, [((inputs.shape[1],), "float32", 0)])


def autoencoder(draw: Draw) -> Parts:
    inputs, data = draw.image((24, 32), (64, 96, 128))
    x, width = inputs, draw.of((8, 16), (32, 64))
    for level in range(2):
        x = _conv(draw, x, width << level, 3, 2)
    for level in reversed(range(2)):
        x = draw.active(draw.normed(layers.Conv2DTranspose(width << level, 4, 2, padding="same")(x)))
    shape = tuple(inputs.shape[1:])
    return Parts([inputs], [(layers.Conv2D(shape[-1], 3, padding="same")(x), *_numbers(shape))], data)


def dense_net(draw: Draw) -> Parts:
    inputs, data = draw.image((20, 24), (64, 96))
    x, growth = _conv(draw, inputs, draw.of((12, 16), (32, 48))), draw.of((6, 8), (16, 24))
    for stage in range(2):
        for _ in range(draw.random.randint(3, 5)):
            x = layers.Concatenate()([x, layers.Conv2D(growth, 3, padding="same")(draw.active(draw.normed(x)))])
        if not stage:
            x = layers.AveragePooling2D(2)(layers.Conv2D(x.shape[-1] // 2, 1)(x))
    return _classifier(draw, inputs, x, data)


FAMILIES: dict[str, Callable[[Draw], Parts]] = {
    make.__name__: make
    for make in (
        plain_conv,
        residual,
        separable,
        unet,
        dilated,
        sequence_conv,
        volumes,
        recurrent,
        encoder,
        language_model,
        translation,
        vision_transformer,
        windows,
        one_layer,
        mixer,
        recommender,
        several,
        tabular,
        autoencoder,
        dense_net,
    )
}
