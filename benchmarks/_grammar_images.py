"""Families of random models that look at images, volumes and signals."""

from __future__ import annotations

import keras
from keras import layers

from _grammar_parts import Draw, Parts, classifier, conv, labels, numbers


def plain_conv(draw: Draw) -> Parts:
    inputs, data = draw.image((20, 28, 32), (64, 96, 128))
    x, width = inputs, draw.of((8, 12, 16), (32, 48, 64))
    for stage in range(draw.random.randint(2, 4)):
        for _ in range(draw.random.randint(1, 3)):
            x = conv(draw, x, width << stage, draw.random.choice((3, 3, 5)))
        x = layers.MaxPooling2D()(x) if draw.random.random() < 0.6 else layers.AveragePooling2D(2)(x)
    return classifier(draw, inputs, x, data)


def residual(draw: Draw) -> Parts:
    inputs, data = draw.image((20, 24, 32), (64, 96, 112))
    bottleneck, first = draw.random.random() < 0.5, draw.of((12, 16), (32, 64))
    x = conv(draw, inputs, first)
    for stage in range(3):
        for block in range(draw.random.randint(1, 3)):
            stride, width = (2 if stage and not block else 1), first << stage
            y = conv(draw, x, width // 2, 1) if bottleneck else x
            y = conv(draw, y, width // 2 if bottleneck else width, 3, stride)
            y = draw.normed(layers.Conv2D(width, 1 if bottleneck else 3, padding="same")(y))
            short = x if stride == 1 and x.shape[-1] == width else layers.Conv2D(width, 1, stride)(x)
            x = draw.active(layers.Add()([short, y]))
    return classifier(draw, inputs, x, data)


def separable(draw: Draw) -> Parts:
    inputs, data = draw.image((24, 32), (96, 128, 160))
    x, excite = conv(draw, inputs, draw.of((8, 16), (24, 32)), 3, 2), draw.random.random() < 0.5
    for width in draw.of(((12, 16, 24), (16, 32)), ((32, 48, 96), (48, 64, 96, 128))):
        y = conv(draw, x, draw.random.choice((3, 4, 6)) * x.shape[-1], 1)
        y = draw.active(draw.normed(layers.DepthwiseConv2D(draw.random.choice((3, 5)), padding="same")(y)))
        if excite:
            squeezed = layers.GlobalAveragePooling2D(keepdims=True)(y)
            gate = layers.Dense(y.shape[-1], activation="sigmoid")(layers.Dense(8, activation="relu")(squeezed))
            y = layers.Multiply()([y, gate])
        y = draw.normed(layers.Conv2D(width, 1)(y))
        x = layers.Add()([x, y]) if x.shape[-1] == width else y
    return classifier(draw, inputs, x, data)


def unet(draw: Draw) -> Parts:
    inputs, data = draw.image((32, 48), (128, 192, 256))
    width, depth, x, skips = draw.of((6, 8, 12), (16, 24, 32)), draw.random.randint(2, 4), inputs, []
    for level in range(depth):
        x = conv(draw, conv(draw, x, width << level), width << level)
        skips.append(x)
        x = layers.MaxPooling2D()(x)
    x = conv(draw, x, width << depth)
    upsample = draw.random.random() < 0.5
    for level in reversed(range(depth)):
        x = layers.UpSampling2D()(x) if upsample else layers.Conv2DTranspose(width << level, 2, 2)(x)
        x = conv(draw, layers.Concatenate()([x, skips[level]]), width << level)
    count, size = draw.random.choice((2, 5, 20)), inputs.shape[1]
    return Parts([inputs], [(layers.Conv2D(count, 1)(x), *labels((size, size), count))], data)


def dilated(draw: Draw) -> Parts:
    inputs, data = draw.image((24, 32), (96, 128))
    x = conv(draw, inputs, draw.of((12, 16), (48, 64)))
    for rate in draw.random.choice(((1, 2, 4), (1, 2, 4, 8), (2, 4, 2, 1))):
        x = layers.Add()([x, conv(draw, x, x.shape[-1], 3, 1, rate)])
    branches = [conv(draw, x, x.shape[-1] // 2, 3, 1, rate) for rate in (1, 3, 6)]
    x = layers.Conv2D(x.shape[-1], 1)(layers.Concatenate()(branches))
    size = inputs.shape[1]
    return Parts([inputs], [(layers.Conv2D(4, 1)(x), *labels((size, size), 4))], data)


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
        return Parts([inputs], [(head, *numbers((length, 3), "mae"))], [((length, channels), "float32", 0)])
    return classifier(draw, inputs, x, [((length, channels), "float32", 0)])


def volumes(draw: Draw) -> Parts:
    size = draw.of((10, 12), (32, 40))
    inputs = keras.Input((size, size, size, 1))
    x, width = inputs, draw.of((6, 8), (16, 24))
    for stage in range(2):
        for _ in range(draw.random.randint(1, 2)):
            x = draw.active(draw.normed(layers.Conv3D(width << stage, 3, padding="same")(x)))
        x = layers.MaxPooling3D()(x)
    return classifier(draw, inputs, x, [((size, size, size, 1), "float32", 0)])


def autoencoder(draw: Draw) -> Parts:
    inputs, data = draw.image((24, 32), (64, 96, 128))
    x, width = inputs, draw.of((8, 16), (32, 64))
    for level in range(2):
        x = conv(draw, x, width << level, 3, 2)
    for level in reversed(range(2)):
        x = draw.active(draw.normed(layers.Conv2DTranspose(width << level, 4, 2, padding="same")(x)))
    shape = tuple(inputs.shape[1:])
    return Parts([inputs], [(layers.Conv2D(shape[-1], 3, padding="same")(x), *numbers(shape))], data)


def dense_net(draw: Draw) -> Parts:
    inputs, data = draw.image((20, 24), (64, 96))
    x, growth = conv(draw, inputs, draw.of((12, 16), (32, 48))), draw.of((6, 8), (16, 24))
    for stage in range(2):
        for _ in range(draw.random.randint(3, 5)):
            x = layers.Concatenate()([x, layers.Conv2D(growth, 3, padding="same")(draw.active(draw.normed(x)))])
        if not stage:
            x = layers.AveragePooling2D(2)(layers.Conv2D(x.shape[-1] // 2, 1)(x))
    return classifier(draw, inputs, x, data)
