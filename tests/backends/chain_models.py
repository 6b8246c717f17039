"""Models whose segments are known, for chains and recomputed steps to be checked on: each with a batch size."""

import keras
from keras import layers

SPARSE = "sparse_categorical_crossentropy"


def compiled(inputs, outputs, optimizer="adam", loss=SPARSE, **options):
    model = keras.Model(inputs, outputs, **options)
    model.compile(optimizer, loss, jit_compile=False)
    return model


def resnet():
    model = keras.applications.ResNet50(weights=None, input_shape=(64, 64, 3), classes=10)
    model.compile("adam", SPARSE, jit_compile=False)
    return model, 8


def unet():
    x = inputs = keras.Input((64, 64, 3))
    skips = []
    for depth, filters in enumerate((16, 32)):
        x = layers.Conv2D(filters, 3, padding="same", name=f"down_{depth}")(x)
        x = layers.ReLU(name=f"relu_{depth}")(x)
        skips.append(x)
        x = layers.MaxPooling2D(name=f"pool_{depth}")(x)
    x = layers.Conv2D(64, 3, padding="same", activation="relu", name="bottom")(x)
    for depth, filters in ((1, 32), (0, 16)):
        x = layers.UpSampling2D(name=f"larger_{depth}")(x)
        x = layers.Concatenate(name=f"join_{depth}")([x, skips.pop()])
        x = layers.Conv2D(filters, 3, padding="same", activation="relu", name=f"up_{depth}")(x)
    return compiled(inputs, layers.Conv2D(4, 1, activation="softmax", name="last")(x), "sgd"), 16


def transformer():
    """Every block is `block_i_norm..block_i_sum`."""
    inputs = keras.Input((64,), dtype="int32")
    x = layers.Embedding(1000, 128, mask_zero=True, name="table")(inputs)
    for index in range(4):
        name = f"block_{index}"
        y = layers.LayerNormalization(name=f"{name}_norm")(x)
        x = layers.Add(name=f"{name}_add")([x, layers.MultiHeadAttention(4, 32, name=f"{name}_attention")(y, y)])
        y = layers.LayerNormalization(name=f"{name}_norm_2")(x)
        y = layers.Dense(512, activation="gelu", name=f"{name}_up")(y)
        y = layers.Dense(128, name=f"{name}_down")(y)
        x = layers.Add(name=f"{name}_sum")([x, y])
    x = layers.GlobalAveragePooling1D(name="mean")(x)
    return compiled(inputs, layers.Dense(10, activation="softmax", name="head")(x)), 32


def residual():
    """Twelve blocks, each `block_i_up..block_i_sum`."""
    inputs = keras.Input((64,))
    x = layers.Dense(256, name="first")(inputs)
    for index in range(12):
        y = layers.Dense(1024, activation="gelu", name=f"block_{index}_up")(x)
        y = layers.Dense(256, name=f"block_{index}_down")(y)
        x = layers.Add(name=f"block_{index}_sum")([x, y])
    return compiled(inputs, layers.Dense(10, activation="softmax", name="head")(x), "sgd"), 4096


def nested():
    backbone = keras.Sequential(
        [
            keras.Input((32, 32, 3)),
            layers.Conv2D(16, 3, padding="same", name="conv_1"),
            layers.BatchNormalization(name="norm"),
            layers.ReLU(name="relu"),
            layers.Conv2D(32, 3, strides=2, padding="same", name="conv_2"),
        ],
        name="backbone",
    )
    stack = [keras.Input((32, 32, 3)), layers.Rescaling(0.5, name="scaled"), backbone]
    stack += [layers.GlobalAveragePooling2D(name="mean"), layers.Dense(10, activation="softmax", name="head")]
    model = keras.Sequential(stack)
    model.compile("adam", SPARSE, jit_compile=False)
    return model, 32


def blocks(name, model):
    """The segments of a model made of blocks, one for each."""
    first, last = {"residual": ("up", "sum"), "transformer": ("norm", "sum")}[name]
    count = sum(layer.name.endswith("_sum") for layer in model.layers)
    return tuple(f"block_{index}_{first}..block_{index}_{last}" for index in range(count))
