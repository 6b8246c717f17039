"""gradients with has_aux: what a loss function gives beside the loss, put together from pieces."""

import keras
import numpy as np
import pytest
from here import only, out_of_memory
from hooks import Faults, Faulty
from keras import ops
from models import (
    BATCH,
    STEPS,
    classes,
    classifier,
    made,
    numbers,
    tagger,
    tags,
    weights,
    words,
)
from own_loops import WAYS, a_variable, check, compiled, dense, masked, with_aux

import oomproof

pytestmark = pytest.mark.usefixtures("float64")


@pytest.mark.parametrize("way", WAYS)
def test_auxiliary_outputs_of_pieces_are_put_one_behind_the_other(way):
    model = made(classifier)
    loss_fn, variables, data = with_aux(model), model.trainable_variables, (numbers(BATCH), classes(BATCH))
    used = compiled(loss_fn) if way == "compiled loss" else loss_fn
    _, expected = loss_fn(*(ops.convert_to_tensor(part) for part in data))
    for size in (5,) if way == "inside" else (1, 5, BATCH, BATCH + 3):

        def run(*data, size=size):
            return oomproof.gradients(used, variables, data, micro_batch_size=size, has_aux=True)

        run = compiled(run) if way == "inside" else run
        (loss, aux), found = run(*(ops.convert_to_tensor(part) for part in data))
        check(lambda *data: loss_fn(*data)[0], variables, data, (loss, found))
        keras.tree.assert_same_structure(aux, expected)
        for a, b in zip(keras.tree.flatten(aux), keras.tree.flatten(expected), strict=True):
            if b is not None:
                np.testing.assert_allclose(dense(a), dense(b), atol=1e-12)


def test_auxiliary_outputs_beside_a_sum_and_a_normaliser():
    model = made(tagger)
    data, variables = (words(BATCH), tags(BATCH), weights(BATCH, STEPS)), model.trainable_variables

    def loss_fn(x, y, weight):
        return masked(model)(x, y, weight), model(x)

    (loss, aux), found = oomproof.gradients(loss_fn, variables, data, micro_batch_size=5, has_aux=True)
    check(masked(model), variables, data, (loss, found))
    np.testing.assert_allclose(dense(aux), dense(model(data[0])), atol=1e-12)


def test_auxiliary_outputs_after_an_out_of_memory_error():
    faults = Faults()
    model = made(lambda: classifier(Faulty(faults)))
    data = numbers(BATCH), classes(BATCH)
    _, expected = with_aux(model)(*(ops.convert_to_tensor(part) for part in data))
    faults.arm("forward", 0, out_of_memory())
    (_, aux), _ = oomproof.gradients(with_aux(model), model.trainable_variables, data, has_aux=True)
    assert faults.raised
    np.testing.assert_allclose(dense(aux["predictions"]), dense(expected["predictions"]), atol=1e-12)


@only("jax", because="a loss function with `jax.jit`")
def test_auxiliary_outputs_of_a_jitted_loss():
    import jax

    model = made(classifier)
    data, variables, plain = (numbers(BATCH), classes(BATCH)), model.trainable_variables, with_aux(model)
    jitted = jax.jit(lambda x, y: plain(x, y))
    _, expected = plain(*(ops.convert_to_tensor(part) for part in data))
    for _ in range(2):
        (loss, aux), found = oomproof.gradients(jitted, variables, data, micro_batch_size=5, has_aux=True)
        check(lambda *data: plain(*data)[0], variables, data, (loss, found))
        np.testing.assert_allclose(dense(aux["predictions"]), dense(expected["predictions"]), atol=1e-12)


@pytest.mark.parametrize(
    ("aux", "words"),
    [
        (lambda x: ops.mean(x), r"row for each sample.* Received: shape \(\)"),
        (lambda x: {"all": [x, ops.mean(x, axis=0)]}, r"row for each sample.* Received: shape \(4,\)"),
        (lambda x: 3.0, r"row for each sample.* Received: shape \(\)"),
        (lambda x: "accuracy", "row for each sample.* Received: a str"),
    ],
)
@pytest.mark.parametrize("size", ["auto", 3])
def test_auxiliary_outputs_without_rows(aux, words, size):
    with pytest.raises((ValueError, TypeError), match=words):
        oomproof.gradients(
            lambda x, y: (ops.mean(x, axis=1), aux(x)),
            [a_variable()],
            (numbers(BATCH), classes(BATCH)),
            micro_batch_size=size,
            has_aux=True,
        )


@only("tensorflow", because="a loss function that is a `tf.function`")
def test_auxiliary_outputs_without_rows_whose_size_is_not_known_while_tracing():
    import tensorflow as tf

    loss_fn = tf.function(lambda x, y: (ops.mean(x, axis=1), tf.reshape(x, (-1, 2))))
    with pytest.raises(tf.errors.InvalidArgumentError, match="does not have a row for each sample"):
        oomproof.gradients(loss_fn, [a_variable()], (numbers(BATCH), classes(BATCH)), micro_batch_size=5, has_aux=True)


def test_nothing_beside_the_loss_though_something_was_promised():
    data = numbers(BATCH), classes(BATCH)
    with pytest.raises(ValueError, match=r"\(loss, auxiliary outputs\), because of has_aux=True"):
        oomproof.gradients(lambda x, y: ops.mean(x, axis=1), [a_variable()], data, has_aux=True)
