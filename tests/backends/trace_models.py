"""Small models of many kinds, at batch sizes that make their activations count, for estimates to be compared with."""

import dataclasses

import keras
from keras import layers


@dataclasses.dataclass(frozen=True)
class Kind:
    """A tensor of the batch, without the batch axis: numbers, or integers below a limit."""

    shape: tuple = ()
    below: int = 0


SPARSE = "sparse_categorical_crossentropy"


def compiled(model, optimizer="adam", loss=SPARSE, metrics=("accuracy",)):
    model.compile(optimizer=optimizer, loss=loss, metrics=list(metrics), jit_compile=False)
    return model


def plain_cnn():
    stack = [keras.Input((32, 32, 3))]
    for filters in (32, 64, 128):
        stack += [layers.Conv2D(filters, 3, padding="same", activation="relu"), layers.MaxPooling2D()]
    stack += [layers.Flatten(), layers.Dense(256, activation="relu"), layers.Dropout(0.5), layers.Dense(10)]
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return compiled(keras.Sequential(stack), "adam", loss), 256, (Kind((32, 32, 3)), Kind(below=10))


def residual_cnn():
    inputs = keras.Input((32, 32, 3))
    x = layers.Conv2D(32, 3, padding="same", use_bias=False)(inputs)
    for filters, stride in ((32, 1), (64, 2), (128, 2)):
        y = layers.Conv2D(filters, 3, stride, padding="same", use_bias=False)(x)
        y = layers.ReLU()(layers.BatchNormalization()(y))
        y = layers.BatchNormalization()(layers.Conv2D(filters, 3, padding="same", use_bias=False)(y))
        x = layers.ReLU()(layers.Add()([y, layers.Conv2D(filters, 1, stride)(x)]))
    x = layers.GlobalAveragePooling2D()(x)
    model = keras.Model(inputs, layers.Dense(10, activation="softmax")(x))
    return compiled(model, keras.optimizers.SGD(0.01, momentum=0.9)), 128, (Kind((32, 32, 3)), Kind(below=10))


def mobile():
    x = inputs = keras.Input((48, 48, 3))
    x = layers.ReLU(6.0)(layers.BatchNormalization()(layers.Conv2D(16, 3, 2, padding="same", use_bias=False)(x)))
    for filters, stride in ((32, 1), (64, 2), (64, 1), (128, 2)):
        x = layers.DepthwiseConv2D(3, stride, padding="same", use_bias=False)(x)
        x = layers.ReLU(6.0)(layers.BatchNormalization()(x))
        x = layers.Conv2D(filters, 1, use_bias=False)(x)
        x = layers.Activation("swish")(layers.BatchNormalization()(x))
    x = layers.Dense(10, activation="softmax")(layers.GlobalAveragePooling2D()(x))
    return compiled(keras.Model(inputs, x), "adam"), 128, (Kind((48, 48, 3)), Kind(below=10))


def unet():
    x = inputs = keras.Input((64, 64, 3))
    skips = []
    for filters in (16, 32):
        x = layers.Conv2D(filters, 3, padding="same", activation="relu")(x)
        skips.append(x)
        x = layers.MaxPooling2D()(x)
    x = layers.Conv2D(64, 3, padding="same", activation="relu")(x)
    for filters in (32, 16):
        x = layers.UpSampling2D()(x)
        x = layers.Concatenate()([x, skips.pop()])
        x = layers.Conv2D(filters, 3, padding="same", activation="relu")(x)
    model = keras.Model(inputs, layers.Conv2D(4, 1, activation="softmax")(x))
    return compiled(model, "sgd"), 32, (Kind((64, 64, 3)), Kind((64, 64), 4))


def _block(x, width, heads, dropout=0.1):
    y = layers.LayerNormalization()(x)
    x = layers.Add()([x, layers.MultiHeadAttention(heads, width // heads, dropout=dropout)(y, y)])
    y = layers.LayerNormalization()(x)
    y = layers.Dense(width)(layers.Dense(4 * width, activation="gelu")(y))
    return layers.Add()([x, layers.Dropout(dropout)(y)])


def transformer():
    inputs = keras.Input((64,), dtype="int32")
    x = layers.Embedding(2000, 128)(inputs)
    for _ in range(2):
        x = _block(x, 128, 4)
    x = layers.Dense(2000)(layers.LayerNormalization()(x))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return compiled(keras.Model(inputs, x), "adam", loss), 32, (Kind((64,), 2000), Kind((64,), 2000))


def vit():
    inputs = keras.Input((32, 32, 3))
    x = layers.Reshape((64, 96))(layers.Conv2D(96, 4, 4)(inputs))
    for _ in range(3):
        x = _block(x, 96, 3, dropout=0.0)
    x = layers.Dense(10, activation="softmax")(layers.GlobalAveragePooling1D()(layers.LayerNormalization()(x)))
    model = compiled(keras.Model(inputs, x), keras.optimizers.AdamW(1e-3))
    return model, 64, (Kind((32, 32, 3)), Kind(below=10))


def lstm():
    inputs = keras.Input((48, 32))
    x = layers.LSTM(128, return_sequences=True)(inputs)
    x = layers.Dense(1)(layers.LSTM(128)(x))
    return compiled(keras.Model(inputs, x), "adam", "mse", ()), 128, (Kind((48, 32)), Kind((1,)))


def gru():
    inputs = keras.Input((32,), dtype="int32")
    x = layers.Bidirectional(layers.GRU(96, return_sequences=True))(layers.Embedding(5000, 64)(inputs))
    x = layers.Dense(2, activation="softmax")(layers.GlobalMaxPooling1D()(x))
    return compiled(keras.Model(inputs, x), "rmsprop"), 128, (Kind((32,), 5000), Kind(below=2))


def embedding_mlp():
    inputs = keras.Input((20,), dtype="int32")
    x = layers.Flatten()(layers.Embedding(100_000, 64)(inputs))
    x = layers.Dense(512, activation="relu")(x)
    x = layers.BatchNormalization()(layers.Dense(512, activation="relu")(x))
    model = compiled(keras.Model(inputs, layers.Dense(1, activation="sigmoid")(x)), "adam", "binary_crossentropy")
    return model, 512, (Kind((20,), 100_000), Kind((1,)))


def several_inputs():
    image, row = keras.Input((40, 40, 3), name="image"), keras.Input((500,), name="row")
    x = layers.MaxPooling2D()(layers.Conv2D(48, 5, padding="same", activation="elu")(image))
    x = layers.GlobalAveragePooling2D()(layers.SeparableConv2D(96, 3, activation="tanh")(x))
    z = layers.Dense(1000, activation="relu")(row)
    joined = layers.Concatenate()([x, z])
    model = keras.Model(
        {"image": image, "row": row}, {"a": layers.Dense(5, name="a")(joined), "b": layers.Dense(1, name="b")(z)}
    )
    loss = {"a": keras.losses.SparseCategoricalCrossentropy(from_logits=True), "b": "mse"}
    model.compile(optimizer="nadam", loss=loss, jit_compile=False)
    return model, 96, ({"image": Kind((40, 40, 3)), "row": Kind((500,))}, {"a": Kind(below=5), "b": Kind((1,))})


def autoencoder():
    x = inputs = keras.Input((32, 32, 3))
    for filters in (32, 64):
        x = layers.LeakyReLU()(layers.Conv2D(filters, 3, 2, padding="same")(x))
    x = layers.Dense(2048, activation="relu")(layers.Dense(64)(layers.Flatten()(x)))
    x = layers.Reshape((8, 8, 32))(x)
    for filters in (64, 32):
        x = layers.LeakyReLU()(layers.BatchNormalization()(layers.Conv2DTranspose(filters, 4, 2, padding="same")(x)))
    model = keras.Model(inputs, layers.Conv2D(3, 3, padding="same", activation="sigmoid")(x))
    return compiled(model, "sgd", "mse", ()), 128, (Kind((32, 32, 3)), Kind((32, 32, 3)))


def functional_mlp():
    stack = [keras.Input((1024,)), *(layers.Dense(2048, activation="relu") for _ in range(4)), layers.Dense(100)]
    model = compiled(keras.Sequential(stack), "adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model, 512, (Kind((1024,)), Kind(below=100))


MODELS = {
    model.__name__: model
    for model in (
        plain_cnn,
        residual_cnn,
        mobile,
        unet,
        transformer,
        vit,
        lstm,
        gru,
        embedding_mlp,
        several_inputs,
        autoencoder,
        functional_mlp,
    )
}
