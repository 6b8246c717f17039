"""Models: masks, several inputs and outputs, shared, nested and frozen layers."""

import keras
import numpy as np
import pytest
from here import crossed, modes
from keras import layers, ops
from models import (
    CLASSES,
    FEATURES,
    SAMPLES,
    STEPS,
    WORDS,
    check_exact,
    classes,
    compiled,
    numbers,
    regressor,
    tags,
    weights,
    words,
)

pytestmark = pytest.mark.usefixtures("float64")


def frames():
    """Sequences of numbers, padded with zeros."""
    found = numbers(SAMPLES * STEPS).reshape(SAMPLES, STEPS, FEATURES)
    return np.where(words()[..., None] > 0, found, 0.0)


def test_masking_layer_before_lstm():
    def build():
        inner = [layers.Masking(), layers.LSTM(3, return_sequences=True), layers.Dense(CLASSES, "softmax")]
        return compiled(keras.Sequential([layers.Input((STEPS, FEATURES)), *inner]))

    check_exact(build, frames(), tags(), sample_weight=weights(SAMPLES, STEPS), mode="graph")


class DropsShortWords(layers.Layer):
    """A mask that a layer of the user's own makes."""

    def call(self, x):
        return ops.one_hot(x, WORDS)

    def compute_mask(self, inputs, previous_mask=None):
        return inputs > 2

    def compute_output_shape(self, shape):
        return (*shape, WORDS)


def test_mask_made_by_own_layer():
    def build():
        return compiled(
            keras.Sequential(
                [layers.Input((STEPS,), dtype="int32"), DropsShortWords(), layers.Dense(CLASSES, "softmax")]
            )
        )

    check_exact(build, words(), tags())


def test_mask_made_by_lambda():
    def build():
        masked = layers.Lambda(lambda x: x, mask=lambda inputs, mask: ops.any(inputs != 0, axis=-1))
        return compiled(keras.Sequential([layers.Input((STEPS, FEATURES)), masked, layers.Dense(CLASSES, "softmax")]))

    check_exact(build, frames(), tags())


def test_mask_ends_before_the_output():
    """A mask that a layer uses up does not count in the loss."""

    def build():
        inner = [layers.Embedding(WORDS, 4, mask_zero=True), layers.GRU(3), layers.Dense(CLASSES, "softmax")]
        return compiled(keras.Sequential([layers.Input((STEPS,), dtype="int32"), *inner]))

    check_exact(build, words(), classes())


def two_headed(outputs, **options):
    """Two inputs, two outputs of which one is masked, and a layer that both share."""
    text, numeric = layers.Input((STEPS,), dtype="int32", name="text"), layers.Input((FEATURES,), name="numeric")
    shared = layers.Dense(4, "tanh")
    sequence = shared(layers.Embedding(WORDS, 4, mask_zero=True)(text))
    both = layers.Concatenate()([layers.GlobalAveragePooling1D()(sequence), shared(numeric)])
    tag = layers.Dense(CLASSES, "softmax", name="tag")(sequence)
    value = layers.Dense(1, name="value")(both)
    named = {"tag": tag, "value": value} if outputs == "dict" else [tag, value]
    model = keras.Model({"text": text, "numeric": numeric}, named)
    losses = {"tag": "sparse_categorical_crossentropy", "value": "mse"}
    return compiled(model, losses if outputs == "dict" else list(losses.values()), **options)


def two_inputs():
    return {"text": words(), "numeric": numbers()}


@pytest.mark.parametrize(("outputs", "mode"), crossed(["dict", "list"], modes("graph", "eager")))
def test_several_outputs(outputs, mode):
    """Losses of the outputs in History too, which Keras weights differently in graph and eager mode."""
    targets = {"tag": tags(), "value": numbers(width=1, seed=1)}
    sample_weight = {"tag": weights(SAMPLES, STEPS), "value": weights(seed=5)}
    if outputs == "list":
        targets, sample_weight = list(targets.values()), list(sample_weight.values())
    loss_weights = {"tag": 0.3, "value": 2.0}
    check_exact(
        lambda: two_headed(outputs, loss_weights=loss_weights if outputs == "dict" else [0.3, 2.0]),
        two_inputs(),
        targets,
        sample_weight=sample_weight,
        mode=mode,
        plain_mode=mode,
    )


def test_outputs_with_different_kinds_of_loss():
    """One loss that splits and one that does not; metrics of both."""

    def build():
        def scalar(y_true, y_pred):
            return ops.mean(ops.square(y_true - y_pred)) + ops.max(y_pred)

        model = two_headed("dict", metrics={"tag": ["accuracy"], "value": ["mae"]})
        return compiled(model, {"tag": "sparse_categorical_crossentropy", "value": scalar}, metrics={"tag": "accuracy"})

    check_exact(build, two_inputs(), {"tag": tags(), "value": numbers(width=1, seed=1)}, plain_mode="graph")


def test_output_without_loss():
    def build():
        return compiled(two_headed("dict"), {"value": "mse"})

    check_exact(build, two_inputs(), {"value": numbers(width=1, seed=1)})


def test_nested_shared_and_frozen():
    def build():
        inner = keras.Sequential([layers.Input((FEATURES,)), layers.Dense(FEATURES, "tanh"), layers.Dense(FEATURES)])
        inner.layers[0].trainable = False
        frozen = keras.Sequential([layers.Input((FEATURES,)), layers.Dense(FEATURES, kernel_regularizer="l2")])
        frozen.trainable = False
        x = layers.Input((FEATURES,))
        twice = inner(frozen(inner(x)))
        return compiled(keras.Model(x, layers.Dense(CLASSES, "softmax")(twice)))

    check_exact(build, numbers(), classes())


@pytest.mark.filterwarnings("ignore:The model does not have any trainable weights")
@pytest.mark.parametrize(
    "loss", ["mse", lambda y_true, y_pred: ops.mean(ops.square(y_true - y_pred))], ids=["mse", "scalar"]
)
def test_nothing_to_train(loss):
    def build():
        model = regressor(loss=loss, metrics=["mae"])
        model.trainable = False
        return compiled(model, loss, metrics=["mae"])

    check_exact(build, numbers(), numbers(width=2, seed=1))


class Subclassed(keras.Model):
    """Unbuilt until its first batch, takes a tuple, and leaves one variable without gradient."""

    def __init__(self):
        super().__init__()
        self.first, self.last = layers.Dense(4, "tanh"), layers.Dense(CLASSES, "softmax")

    def build(self, shapes):
        self.unused = self.add_weight(shape=(3,), initializer="ones")
        self.first.build(shapes[0])
        self.last.build((None, 4))

    def call(self, inputs, training=False):
        a, b = inputs
        return self.last(self.first(a) + self.first(b))


@pytest.mark.filterwarnings("ignore:Gradients do not exist")
def test_subclassed_model_with_unused_weight():
    check_exact(lambda: compiled(Subclassed()), (numbers(), numbers(seed=1)), classes())


def test_transformer_block():
    def build():
        x = layers.Input((STEPS,), dtype="int32")
        h = layers.Embedding(WORDS, 4, mask_zero=True)(x)
        h = layers.LayerNormalization()(h + layers.MultiHeadAttention(2, 2)(h, h))
        return compiled(keras.Model(x, layers.Dense(CLASSES, "softmax")(h)))

    check_exact(build, words(), tags(), micro=5, mode="graph")


def test_tied_embedding():
    """One variable with a sparse and a dense gradient."""

    def build():
        x = layers.Input((STEPS,), dtype="int32")
        table = layers.ReversibleEmbedding(WORDS, 4, mask_zero=True)
        return compiled(keras.Model(x, layers.Softmax()(table(table(x), reverse=True))))

    if not hasattr(layers, "ReversibleEmbedding"):
        pytest.skip("this Keras has no layer that ties an embedding")
    check_exact(build, words(), words())


def test_convolutions_and_pooling():
    def build():
        inner = [
            layers.Reshape((STEPS, FEATURES, 1)),
            layers.Conv2D(2, 3, padding="same", activation="relu"),
            layers.MaxPooling2D(2),
            layers.GroupNormalization(1),
            layers.Flatten(),
            layers.Dense(CLASSES, "softmax"),
        ]
        return compiled(keras.Sequential([layers.Input((STEPS, FEATURES)), *inner]))

    check_exact(build, frames(), classes(), micro=7, mode="graph")
