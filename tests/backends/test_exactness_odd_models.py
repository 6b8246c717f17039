"""Models of unusual kinds: float8 layers, variables in half precision, outputs of unusual shapes, own losses."""

import keras
import numpy as np
import pytest
from here import SLOW_COMPILES, crossed, modes, only
from keras import layers, ops
from models import (
    BATCH,
    CLASSES,
    FEATURES,
    SAMPLES,
    STEPS,
    WORDS,
    check_exact,
    compiled,
    force_pieces,
    made,
    numbers,
    snapshot,
    tags,
    words,
)

import oomproof

MODES = modes("graph", "eager", *([] if SLOW_COMPILES else ["xla"]))

# float8 layers


def float8(loss="mse"):
    model = keras.Sequential([layers.Input((FEATURES,)), layers.Dense(5, "tanh"), layers.Dense(2)])
    for layer in model.layers:
        layer.quantize("float8")
    return compiled(model, loss)


def scalar(y_true, y_pred):
    return ops.mean(ops.square(y_true - y_pred))


# Keras's own step fails on TensorFlow with such layers and `run_eagerly`.
@pytest.mark.parametrize(
    ("mode", "loss"),
    [
        *((mode, "mse") for mode in modes("graph", "uncompiled", *([] if SLOW_COMPILES else ["xla"]))),
        *((mode, scalar) for mode in modes("uncompiled")),
    ],
)
def test_float8_layers_keep_the_largest_values_of_all_pieces(mode, loss):
    """What overwrites a variable is no gradient: added up over pieces, scales explode."""
    # These layers compute their biases in bfloat16, and so the sums of a piece.
    data = numbers(), numbers(width=2, seed=1)
    check_exact(lambda: float8(loss), *data, micro=5, mode=mode, plain_mode="graph", tolerance=2e-3)


def test_float8_layers_with_an_update_in_place():
    expected = made(float8)
    expected.train_on_batch(numbers(BATCH), numbers(BATCH, 2, seed=1))
    model = oomproof.guard(made(float8), micro_batch_size=4)
    model._oomproof_guard._ready().training.current.lean = True
    model.train_on_batch(numbers(BATCH), numbers(BATCH, 2, seed=1))
    for a, b in zip(expected.variables, model.variables, strict=True):
        np.testing.assert_allclose(ops.convert_to_numpy(b), ops.convert_to_numpy(a), atol=1e-3, err_msg=a.path)


def test_gradients_of_float8_layers_are_refused():
    model = made(float8)
    with pytest.raises(oomproof.UnsupportedModelError, match="float8"):
        oomproof.gradients(
            lambda x: ops.square(model(x)), model.trainable_variables, numbers(4).astype("float32"), micro_batch_size=2
        )


# Variables in half precision


@pytest.mark.parametrize(("mode", "dtype"), crossed(modes("graph", "eager"), ["bfloat16", "float16"]))
def test_variables_in_half_precision(mode, dtype):
    def build():
        inner = [layers.Embedding(WORDS, 4, dtype=dtype), layers.Dense(CLASSES, "softmax", dtype=dtype)]
        return compiled(keras.Sequential([layers.Input((STEPS,), dtype="int32"), *inner]))

    # Pieces of another size are multiplied in another order, which half precision shows.
    check_exact(build, words(), tags(), micro=5, mode=mode, tolerance=4e-3)


# Outputs without a row for each sample


def frames(width=FEATURES, seed=0):
    return numbers(SAMPLES * STEPS, width, seed).reshape(SAMPLES, STEPS, width)


class Shaped(keras.Model):
    """A network for each step of a sequence. `shape` makes an output of (samples, steps, 2)."""

    def __init__(self, shape):
        super().__init__()
        self.inner, self.shape = layers.Dense(2), shape

    def call(self, x):
        return self.shape(self.inner(x))


def shaped(shape, loss):
    return lambda: compiled(Shaped(shape), loss)


def rows_of_steps(outputs):
    return ops.reshape(outputs, (-1, 2))


def rows_of_samples_last(outputs):
    return ops.reshape(ops.transpose(outputs, (1, 0, 2)), (-1, 2))


def by_step(y_true, y_pred):
    # The largest of all, so that it is no sum of shares of pieces.
    wrong = ops.mean(ops.square(ops.reshape(y_true, (-1, 2)) - y_pred), -1)
    return wrong + ops.max(wrong)


def by_step_samples_last(y_true, y_pred):
    return by_step(ops.transpose(y_true, (1, 0, 2)), y_pred)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("mode", MODES)
def test_output_with_a_row_for_each_step_of_each_sample(mode):
    targets = frames(width=2, seed=1)
    check_exact(shaped(rows_of_steps, by_step), frames(), targets, micro=5, mode=mode)


@pytest.mark.usefixtures("float64")
def test_prediction_with_a_row_for_each_step_of_each_sample():
    model = made(shaped(rows_of_steps, by_step))
    expected = model.predict(frames(), batch_size=BATCH, verbose=0)
    force_pieces(oomproof.guard(model), 5)
    np.testing.assert_allclose(model.predict(frames(), batch_size=BATCH, verbose=0), expected, atol=1e-12)


NOT_BY_SAMPLE = {
    "mean of all": (lambda outputs: ops.mean(outputs, axis=0), lambda y, p: ops.mean(ops.square(y - p))),
    "samples last": (rows_of_samples_last, by_step_samples_last),
    "a scalar": (ops.mean, lambda y, p: ops.mean(ops.square(y - p))),
}


@pytest.mark.parametrize(("case", "mode"), crossed(NOT_BY_SAMPLE, modes("graph", "eager")))
def test_output_that_pieces_cannot_make_is_refused(case, mode):
    model = made(shaped(*NOT_BY_SAMPLE[case]), mode)
    model.train_on_batch(frames()[:BATCH], frames(width=2, seed=1)[:BATCH])
    before = snapshot(model)
    oomproof.guard(model, micro_batch_size=4)
    with pytest.raises(oomproof.UnsupportedModelError, match="Give every output a row for each sample"):
        model.fit(frames(), frames(width=2, seed=1), batch_size=BATCH, verbose=0)
    for name, value in snapshot(model).items():
        np.testing.assert_array_equal(value, before[name], err_msg=name)


@pytest.mark.parametrize("case", ["mean of all", "samples last"])
def test_prediction_that_pieces_cannot_make_is_refused(case):
    model = oomproof.guard(made(shaped(*NOT_BY_SAMPLE[case])))
    model.predict(frames(), batch_size=BATCH, verbose=0)
    force_pieces(model, 4)
    with pytest.raises(oomproof.UnsupportedModelError, match="Give every output a row for each sample"):
        model.predict(frames(), batch_size=BATCH, verbose=0)


# Outputs that are not there


class Optional(keras.Model):
    """As some models do it: an output that is only there when it is asked for."""

    def __init__(self):
        super().__init__()
        self.inner = layers.Dense(2)

    def call(self, x):
        return {"logits": self.inner(x), "attention": None}


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(("loss", "mode"), crossed(["mse", scalar], modes("graph", "eager")))
def test_none_among_the_outputs(mode, loss):
    def build():
        return compiled(Optional(), {"logits": loss})

    check_exact(build, numbers(), {"logits": numbers(width=2, seed=1)}, mode=mode)


# Losses that use more than they are given


class CallsItself(keras.Model):
    """Compares its predictions for two views of a sample, as semi-supervised training does."""

    def __init__(self, uses_predictions):
        super().__init__()
        self.inner, self.outer = layers.Dense(5, "tanh", activity_regularizer="l2"), layers.Dense(2)
        self.uses_predictions = uses_predictions

    def call(self, x):
        return self.outer(self.inner(x))

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        again = self(x + 0.1, training=training)
        other = y_pred if self.uses_predictions else self(x, training=training)
        return ops.mean(ops.square(y - other)) + ops.mean(ops.square(again - other)) + sum(self.losses)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(("uses_predictions", "mode"), crossed([True, False], modes("graph", "eager")))
def test_own_loss_that_calls_the_model_again(mode, uses_predictions):
    def build():
        return compiled(CallsItself(uses_predictions), None)

    check_exact(build, numbers(), numbers(width=2, seed=1), mode=mode)


class Keeps(keras.Model):
    """Keeps a tensor for a loss that takes it from here."""

    def __init__(self):
        super().__init__()
        self.inner, self.outer = layers.Dense(5, "tanh"), layers.Dense(2)

    def call(self, x):
        inner = self.inner(x)
        object.__setattr__(self, "kept", ops.mean(ops.square(inner)))
        return self.outer(inner)


@only("tensorflow", "jax", because="tensors of a loop that is over")
def test_own_loss_that_uses_a_kept_tensor_is_refused():
    def build():
        model = Keeps()
        return compiled(model, lambda y, p: ops.mean(ops.square(y - p)) + model.kept)

    model = oomproof.guard(made(build, "graph"), micro_batch_size=4)
    with pytest.raises(oomproof.UnsupportedModelError, match="`add_loss`"):
        model.fit(numbers(), numbers(width=2, seed=1), batch_size=BATCH, verbose=0)
