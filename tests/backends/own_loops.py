"""Loss functions of people with their own loop, and the gradients that the framework itself gives for them."""

import keras
import numpy as np
import pytest
from here import BACKEND, only
from keras import ops


def dense(value):
    return None if value is None else np.array(ops.convert_to_numpy(value))


def mean(result):
    return ops.sum(result[0]) / result[1] if isinstance(result, tuple) else ops.mean(result)


def reference(loss_fn, variables, data):
    """Loss and gradients of the whole batch, as the framework itself gives them."""
    data = [ops.convert_to_tensor(part) for part in data]
    if BACKEND == "tensorflow":
        import tensorflow as tf

        with tf.GradientTape() as tape:
            loss = mean(loss_fn(*data))
        found = tape.gradient(loss, [v.value for v in variables])
    elif BACKEND == "jax":
        import jax

        def compute(values):
            with keras.StatelessScope(state_mapping=list(zip(variables, values, strict=True))):
                return mean(loss_fn(*data))

        loss, found = jax.value_and_grad(compute)([v.value for v in variables])
    else:
        import torch

        loss = mean(loss_fn(*data))
        found = torch.autograd.grad(loss, [v.value for v in variables], allow_unused=True)
    return float(loss), [dense(gradient) for gradient in found]


def check(loss_fn, variables, data, received):
    expected_loss, expected = reference(loss_fn, variables, data)
    loss, found = received
    np.testing.assert_allclose(dense(loss), expected_loss, rtol=1e-10)
    for variable, a, b in zip(variables, expected, found, strict=True):
        if a is None:
            assert b is None
        else:
            np.testing.assert_allclose(dense(b), a, atol=1e-10, err_msg=variable.path)


def per_sample(model):
    return lambda x, y: keras.losses.sparse_categorical_crossentropy(y, model(x, training=True))


def masked(model):
    """(sum, normaliser): the mean over words that are not padding."""

    def loss_fn(x, y, weight):
        valid = ops.cast(x != 0, "float64") * weight
        each = keras.losses.sparse_categorical_crossentropy(y, model(x, training=True))
        return ops.sum(each * valid), ops.sum(valid)

    return loss_fn


WAYS = [
    "as it is",
    pytest.param("compiled loss", marks=only("tensorflow", because="a loss function that is a `tf.function`")),
    "inside",
]


def compiled(function):
    if BACKEND == "jax":
        import jax

        return jax.jit(function)
    if BACKEND == "torch":
        import torch

        return torch.compile(function)
    import tensorflow as tf

    return tf.function(function)


def a_variable():
    return keras.Variable(np.ones(3), name="some")


def with_aux(model):
    """Losses, and predictions for metrics in some nesting: with what is not there, and with counts."""

    def loss_fn(x, y):
        predictions = model(x, training=True)
        right = ops.equal(ops.cast(ops.argmax(predictions, axis=-1), "int32"), ops.cast(y, "int32"))
        losses = keras.losses.sparse_categorical_crossentropy(y, predictions)
        return losses, {"predictions": predictions, "rest": (right, None, [x])}

    return loss_fn
