"""Nets of convolutions: images, sound, video, and what is generated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
from keras import layers, ops

from zoo import Built, Data, Spec, builds, classification, classifier, scaled


def conv_bn(x: Any, width: int, kernel: int = 3, strides: int = 1, **options: Any) -> Any:
    x = layers.Conv2D(width, kernel, strides, padding="same", use_bias=False, **options)(x)
    return layers.ReLU()(layers.BatchNormalization()(x))


@builds
def cifar_cnn(scale: float) -> Built:
    """Convolutions, pooling, dropout and a dense head, as in a first tutorial."""
    size = scaled(32, scale, 8)
    x = inputs = keras.Input((size, size, 3))
    for width in (64, 128, 256):
        x = layers.Conv2D(width, 3, padding="same", activation="relu")(x)
        x = layers.Conv2D(width, 3, padding="same", activation="relu")(x)
        x = layers.Dropout(0.25)(layers.MaxPooling2D()(x))
    x = layers.Dense(512, activation="relu")(layers.Flatten()(x))
    return classifier(inputs, layers.Dense(10)(layers.Dropout(0.5)(x)), Spec((size, size, 3)), 10)


@builds
def layernorm_cnn(scale: float) -> Built:
    size = scaled(64, scale)
    x = inputs = keras.Input((size, size, 3))
    for _ in range(6):
        x = layers.Conv2D(96, 3, padding="same", activation="relu")(x)
        x = layers.LayerNormalization()(x)
    return classifier(inputs, layers.Dense(10)(layers.GlobalAveragePooling2D()(x)), Spec((size, size, 3)), 10)


def application(make: Callable[..., Any], scale: float, side: int = 224) -> Built:
    size = scaled(side, scale)
    model = make(weights=None, input_shape=(size, size, 3), classes=1000, classifier_activation=None)
    return Built(model, classification(), Data(Spec((size, size, 3)), Spec((), "int32", 1000)))


@builds
def resnet50(scale: float) -> Built:
    return application(keras.applications.ResNet50, scale)


@builds
def mobilenet_v2(scale: float) -> Built:
    return application(keras.applications.MobileNetV2, scale)


@builds
def efficientnet_b0(scale: float) -> Built:
    return application(keras.applications.EfficientNetB0, scale)


@builds
def densenet121(scale: float) -> Built:
    return application(keras.applications.DenseNet121, scale)


@builds
def resnet_small(scale: float) -> Built:
    """Residual blocks with the normalisation first, for small images."""
    size = scaled(32, scale, 16)
    inputs = keras.Input((size, size, 3))
    x = layers.Conv2D(32, 3, padding="same")(inputs)
    for stage, width in enumerate((32, 64, 128)):
        for block in range(3):
            strides = 2 if stage and not block else 1
            y = layers.ReLU()(layers.BatchNormalization()(x))
            short = layers.Conv2D(width, 1, strides)(y) if strides > 1 else x
            y = conv_bn(y, width, strides=strides)
            x = layers.Add()([short, layers.Conv2D(width, 3, padding="same")(y)])
    x = layers.GlobalAveragePooling2D()(layers.ReLU()(layers.BatchNormalization()(x)))
    return classifier(inputs, layers.Dense(100)(x), Spec((size, size, 3)), 100)


@builds
def unet(scale: float) -> Built:
    """Segmentation with skips: what the encoder made is kept until the decoder joins it."""
    size = scaled(512, scale, 32)
    x = inputs = keras.Input((size, size, 3))
    skips = []
    for width in (32, 64, 128, 256):
        x = conv_bn(conv_bn(x, width), width)
        skips.append(x)
        x = layers.MaxPooling2D()(x)
    x = conv_bn(conv_bn(x, 512), 512)
    for width, skip in zip((256, 128, 64, 32), reversed(skips), strict=True):
        x = layers.Concatenate()([layers.Conv2DTranspose(width, 2, 2, padding="same")(x), skip])
        x = conv_bn(conv_bn(x, width), width)
    loss = keras.losses.BinaryCrossentropy(from_logits=True)
    data = Data(Spec((size, size, 3)), Spec((size, size, 1), "float32"))
    return Built(keras.Model(inputs, layers.Conv2D(1, 1)(x)), loss, data)


@builds
def dilated_segmentation(scale: float) -> Built:
    """Segmentation by dilated convolutions side by side, at an eighth of the resolution, one label a pixel."""
    size = scaled(256, scale, 32)
    x = inputs = keras.Input((size, size, 3))
    for width in (32, 64, 128):
        x = conv_bn(conv_bn(x, width), width, strides=2)
    branches = [conv_bn(x, 128, dilation_rate=rate) for rate in (1, 2, 4, 8)]
    x = conv_bn(layers.Concatenate()(branches), 256, 1)
    x = layers.UpSampling2D(8, interpolation="bilinear")(layers.Conv2D(21, 1)(x))
    data = Data(Spec((size, size, 3)), Spec((size, size), "int32", 21))
    return Built(keras.Model(inputs, x), classification(), data)


@builds
def autoencoder(scale: float) -> Built:
    size = scaled(128, scale, 32)
    x = inputs = keras.Input((size, size, 3))
    for width in (32, 64, 128, 256):
        x = layers.Conv2D(width, 3, 2, padding="same", activation="relu")(x)
    for width in (128, 64, 32, 16):
        x = layers.Conv2DTranspose(width, 3, 2, padding="same", activation="relu")(x)
    outputs = layers.Conv2D(3, 3, padding="same", activation="sigmoid")(x)
    return Built(keras.Model(inputs, outputs), "mse", Data(Spec((size, size, 3)), Spec((size, size, 3))))


@builds
def generator(scale: float) -> Built:
    """The half of a GAN that paints: a vector becomes an image."""
    side = scaled(8, scale, 4)
    x = inputs = keras.Input((128,))
    x = layers.Reshape((side, side, 512))(layers.Dense(side * side * 512, use_bias=False)(x))
    for width in (256, 128, 64):
        x = layers.Conv2DTranspose(width, 4, 2, padding="same", use_bias=False)(x)
        x = layers.LeakyReLU(0.2)(layers.BatchNormalization()(x))
    outputs = layers.Conv2D(3, 5, padding="same", activation="tanh")(x)
    return Built(keras.Model(inputs, outputs), "mae", Data(Spec((128,)), Spec((8 * side, 8 * side, 3))))


class Sampling(layers.Layer):  # type: ignore[misc]  # Keras is seen as untyped.
    """Draws from the distribution a VAE's encoder describes, and adds the divergence to the loss."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.seeds = keras.random.SeedGenerator(0)

    def call(self, inputs: Any) -> Any:
        mean, log_variance = inputs
        divergence = ops.square(mean) + ops.exp(log_variance) - 1 - log_variance
        # TensorFlow adds it to a loss in float32, whatever the layers compute in.
        self.add_loss(1e-3 * ops.mean(ops.cast(divergence, "float32")))
        return mean + ops.exp(log_variance / 2) * keras.random.normal(
            ops.shape(mean), dtype=mean.dtype, seed=self.seeds
        )


@builds
def vae(scale: float) -> Built:
    size = scaled(64, scale, 16)
    x = inputs = keras.Input((size, size, 3))
    for width in (32, 64, 128):
        x = layers.Conv2D(width, 3, 2, padding="same", activation="relu")(x)
    x = layers.Dense(256, activation="relu")(layers.Flatten()(x))
    x = Sampling()([layers.Dense(64)(x), layers.Dense(64)(x)])
    x = layers.Dense((size // 8) ** 2 * 128, activation="relu")(x)
    x = layers.Reshape((size // 8, size // 8, 128))(x)
    for width in (128, 64, 32):
        x = layers.Conv2DTranspose(width, 3, 2, padding="same", activation="relu")(x)
    outputs = layers.Conv2D(3, 3, padding="same", activation="sigmoid")(x)
    return Built(
        keras.Model(inputs, outputs), "binary_crossentropy", Data(Spec((size, size, 3)), Spec((size, size, 3)))
    )


@builds
def audio_cnn(scale: float) -> Built:
    """A second of sound, as samples, through strided one-dimensional convolutions."""
    steps = scaled(16384, scale, 256)
    x = inputs = keras.Input((steps, 1))
    for width in (64, 128, 256, 256):
        x = layers.Conv1D(width, 9, 2, padding="same", use_bias=False)(x)
        x = layers.Activation("gelu")(layers.BatchNormalization()(x))
        x = layers.SeparableConv1D(width, 9, padding="same", activation="relu")(x)
        x = layers.AveragePooling1D(2)(x)
    return classifier(inputs, layers.Dense(35)(layers.GlobalMaxPooling1D()(x)), Spec((steps, 1)), 35)


@builds
def video_cnn(scale: float) -> Built:
    frames, size = 16, scaled(112, scale, 16)
    x = inputs = keras.Input((frames, size, size, 3))
    for width in (32, 64, 128):
        x = layers.Conv3D(width, 3, padding="same", use_bias=False)(x)
        x = layers.MaxPooling3D(2)(layers.ReLU()(layers.BatchNormalization()(x)))
    x = layers.Dense(101)(layers.GlobalAveragePooling3D()(x))
    return classifier(inputs, x, Spec((frames, size, size, 3)), 101)


@builds
def multi_output(scale: float) -> Built:
    """One trunk, three answers: what it is, where it is, and which pixels it covers."""
    size = scaled(128, scale)
    x = inputs = keras.Input((size, size, 3))
    for width in (32, 64, 128):
        x = layers.MaxPooling2D()(conv_bn(conv_bn(x, width), width))
    pooled = layers.GlobalAveragePooling2D()(x)
    label = layers.Dense(20)(pooled)
    box = layers.Dense(4, activation="sigmoid")(layers.Dense(128, activation="relu")(pooled))
    mask = layers.Conv2D(1, 1, activation="sigmoid")(layers.UpSampling2D(4)(conv_bn(x, 64)))
    data = Data(Spec((size, size, 3)), [Spec((), "int32", 20), Spec((4,)), Spec((size // 2, size // 2, 1))])
    return Built(keras.Model(inputs, [label, box, mask]), [classification(), "huber", "mse"], data)


@builds
def siamese(scale: float) -> Built:
    """The same layers called on two images: one set of weights, two sets of activations."""
    size = scaled(96, scale)
    trunk: list[Any] = [keras.Input((size, size, 3))]
    for width in (32, 64, 128):
        trunk += [layers.Conv2D(width, 3, padding="same", activation="relu"), layers.GroupNormalization(8)]
        trunk += [layers.MaxPooling2D()]
    tower = keras.Sequential([*trunk, layers.GlobalAveragePooling2D(), layers.Dense(128)], name="tower")
    left, right = keras.Input((size, size, 3)), keras.Input((size, size, 3))
    apart = layers.Subtract()([tower(left), tower(right)])
    outputs = layers.Dense(1)(layers.Dense(64, activation="relu")(apart))
    loss = keras.losses.BinaryCrossentropy(from_logits=True)
    data = Data([Spec((size, size, 3))] * 2, Spec((1,)))
    return Built(keras.Model([left, right], outputs), loss, data)
