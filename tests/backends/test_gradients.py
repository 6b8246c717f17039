"""gradients: the loss and gradients of the full batch for people with their own loop."""

import keras
import numpy as np
import pytest
from here import SLOW_COMPILES, only, out_of_memory, representative
from hooks import Faults, Faulty
from keras import layers, ops
from models import (
    BATCH,
    CLASSES,
    FEATURES,
    STEPS,
    WORDS,
    classes,
    classifier,
    made,
    numbers,
    tagger,
    tags,
    weights,
    words,
)
from own_loops import WAYS, a_variable, check, compiled, dense, masked, per_sample, reference

import oomproof

pytestmark = pytest.mark.usefixtures("float64")

LOSSES = {
    "per sample": lambda: (classifier, per_sample, (numbers(BATCH), classes(BATCH))),
    "per step": lambda: (lambda: tagger(mask_zero=False), per_sample, (words(BATCH), tags(BATCH))),
    "sum and normaliser": lambda: (tagger, masked, (words(BATCH), tags(BATCH), weights(BATCH, STEPS))),
}


@pytest.mark.parametrize("case", LOSSES)
@pytest.mark.parametrize("way", WAYS[:-1])
def test_gradients_of_the_full_batch(case, way):
    check_full_batch(case, way)


@pytest.mark.parametrize("case", representative(LOSSES, "sum and normaliser"))
def test_gradients_of_the_full_batch_inside_of_a_program(case):
    check_full_batch(case, "inside")


def check_full_batch(case, way):
    build, make, data = LOSSES[case]()
    model = made(build)
    loss_fn, variables = make(model), model.trainable_variables
    used = compiled(loss_fn) if way == "compiled loss" else loss_fn
    for size in (5,) if way == "inside" and SLOW_COMPILES else (1, 5, BATCH):

        def run(*data, size=size):
            return oomproof.gradients(used, variables, data, micro_batch_size=size)

        if way == "inside":
            run = compiled(run)
        check(loss_fn, variables, data, run(*(ops.convert_to_tensor(part) for part in data)))


@only("tensorflow", because="sparse gradients")
def test_sparse_gradients_stay_sparse_and_unmerged():
    import tensorflow as tf

    model = made(lambda: tagger(mask_zero=False))
    _, found = oomproof.gradients(
        per_sample(model), model.trainable_variables, (words(BATCH), tags(BATCH)), micro_batch_size=5
    )
    assert isinstance(found[0], tf.IndexedSlices)
    assert found[0].values.shape[0] == BATCH * STEPS
    np.testing.assert_array_equal(found[0].indices, words(BATCH).reshape(-1))
    assert tuple(found[0].dense_shape) == (WORDS, 4)


def test_gradients_can_be_applied():
    model = made(lambda: tagger(mask_zero=False))
    _, found = oomproof.gradients(
        per_sample(model), model.trainable_variables, (words(BATCH), tags(BATCH)), micro_batch_size=5
    )
    model.optimizer.apply(found, model.trainable_variables)
    assert int(model.optimizer.iterations) == 1


def test_variable_that_the_loss_does_not_use():
    model = made(classifier)
    unused = keras.Variable(np.ones(3), name="unused")
    data = numbers(BATCH), classes(BATCH)
    variables = [*model.trainable_variables, unused]
    check(
        per_sample(model), variables, data, oomproof.gradients(per_sample(model), variables, data, micro_batch_size=5)
    )


def test_data_that_is_not_a_tuple():
    model = made(classifier)

    def loss_fn(batch):
        return keras.losses.sparse_categorical_crossentropy(batch["y"], model(batch["x"]))

    data = {"x": numbers(BATCH), "y": classes(BATCH)}
    received = oomproof.gradients(loss_fn, model.trainable_variables, data, micro_batch_size=5)
    check(lambda x, y: loss_fn({"x": x, "y": y}), model.trainable_variables, (data["x"], data["y"]), received)


def test_auto_runs_whole_where_there_is_room():
    model = made(classifier)
    data, sizes = (numbers(BATCH), classes(BATCH)), []

    def loss_fn(x, y):
        sizes.append(x.shape[0])
        return per_sample(model)(x, y)

    check(
        per_sample(model), model.trainable_variables, data, oomproof.gradients(loss_fn, model.trainable_variables, data)
    )
    assert sizes[-1] == BATCH


def test_dropout_draws_anew_for_each_piece_and_advances():
    model = made(lambda: classifier(layers.Dropout(0.5, seed=1, name="drops")))
    (generator,) = model.get_layer("drops")._seed_generators
    seen = []
    for _ in range(3):
        seen.append(tuple(ops.convert_to_numpy(generator.state.value)))
        oomproof.gradients(
            per_sample(model), model.trainable_variables, (numbers(BATCH), classes(BATCH)), micro_batch_size=5
        )
    assert len(set(seen)) == 3


def test_moving_statistics_advance_once():
    model = made(
        lambda: keras.Sequential([layers.Input((FEATURES,)), layers.BatchNormalization(momentum=0.9), layers.Dense(1)])
    )
    data = numbers(BATCH)
    oomproof.gradients(lambda x: model(x, training=True), model.trainable_variables, (data,), micro_batch_size=4)
    layer = model.layers[0]
    np.testing.assert_allclose(dense(layer.moving_mean), 0.1 * data.mean(0), atol=1e-9)
    # A function says nothing of the layers it uses, so their state is averaged over pieces rather than pooled.
    pieces = data.reshape(3, 4, FEATURES)
    np.testing.assert_allclose(dense(layer.moving_variance), 0.9 + 0.1 * pieces.var(1).mean(0), atol=1e-9)


def scalar(x, y):
    return ops.mean(x)


def three(x, y):
    return ops.mean(x), 1.0, 2.0


def kept(x, y):
    return ops.mean(x, keepdims=True)


def predicted(x, y):
    return ops.mean(x, axis=1), x


def shortened(x, y):
    return ops.mean(x, axis=1), 0.5


def forgotten(x, y):
    ops.mean(x, axis=1)


@pytest.mark.parametrize(
    ("loss_fn", "error", "message"),
    [
        (scalar, ValueError, "Received: a scalar.* return it before it is reduced"),
        (three, ValueError, "Received: a tuple of 3.* has_aux=True"),
        (kept, ValueError, r"Received: shape \(1, 1\) for (4|12|any number of) samples"),
        (predicted, ValueError, r"Received: a pair of shapes \(.+,\) and \(.+, 4\).* has_aux=True"),
        (shortened, ValueError, r"two scalars.* Received: a pair of shapes \(.+,\) and \(\)"),
        (forgotten, TypeError, "Expected `loss_fn` to return a loss for each sample.* Received: None"),
    ],
)
@pytest.mark.parametrize("size", ["auto", 4])
def test_losses_that_cannot_be_put_together(loss_fn, error, message, size):
    with pytest.raises(error, match=message):
        oomproof.gradients(loss_fn, [a_variable()], (numbers(BATCH), classes(BATCH)), micro_batch_size=size)


@only("tensorflow", because="sparse gradients")
@pytest.mark.xfail(strict=True, reason="over_pieces puts all sparse rows one behind the other")
@pytest.mark.parametrize("way", ["as it is", "compiled loss"])
def test_rows_whose_indices_do_not_depend_on_the_batch_are_added(way):
    """A position embedding. Put one behind the other, optimizers would see each piece by itself."""
    model = made(positioned)
    loss_fn, variables = per_sample(model), model.trainable_variables
    data = words(BATCH), tags(BATCH)
    used = compiled(loss_fn) if way == "compiled loss" else loss_fn
    received = oomproof.gradients(used, variables, data, micro_batch_size=5)
    check(loss_fn, variables, data, received)
    (table,) = [g for v, g in zip(variables, received[1], strict=True) if "/positions/" in v.path]
    np.testing.assert_array_equal(table.indices, np.arange(STEPS))


class WithPositions(layers.Layer):
    def __init__(self):
        super().__init__()
        self.words, self.positions = layers.Embedding(WORDS, 4), layers.Embedding(STEPS, 4, name="positions")

    def call(self, x):
        return self.words(x) + self.positions(ops.arange(STEPS))


def positioned():
    inputs = keras.Input((STEPS,), dtype="int32")
    return keras.Model(inputs, layers.Dense(CLASSES, activation="softmax")(WithPositions()(inputs)))


def test_auto_runs_in_pieces_after_an_out_of_memory_error(caplog):
    faults = Faults()
    model = made(lambda: classifier(Faulty(faults)))
    data, loss_fn = (numbers(BATCH), classes(BATCH)), per_sample(model)
    expected = reference(loss_fn, model.trainable_variables, data)
    faults.arm("forward", 0, out_of_memory())
    loss, found = oomproof.gradients(loss_fn, model.trainable_variables, data)
    assert faults.raised
    assert faults.counts["forward"] >= 3
    np.testing.assert_allclose(dense(loss), expected[0], rtol=1e-10)
    for a, b in zip(expected[1], found, strict=True):
        np.testing.assert_allclose(dense(b), a, atol=1e-10)
    assert [record.getMessage() for record in caplog.records if record.name == "oomproof"] == [
        "oomproof: batch 12 now runs as 2 × 6: ran out of memory at 12; nothing lost"
    ]


def test_auto_inside_a_graph():
    model = made(classifier)
    run = compiled(lambda x, y: oomproof.gradients(per_sample(model), model.trainable_variables, (x, y)))
    with pytest.raises(ValueError, match="auto"):
        run(numbers(BATCH), classes(BATCH))


@pytest.mark.parametrize(("size", "error"), [(0, ValueError), (-2, ValueError), (1.5, TypeError), ("many", TypeError)])
def test_wrong_sizes(size, error):
    with pytest.raises(error, match="micro_batch_size"):
        oomproof.gradients(scalar, [a_variable()], (numbers(BATCH), classes(BATCH)), micro_batch_size=size)


def test_samples_that_do_not_match():
    with pytest.raises(ValueError, match="same"):
        oomproof.gradients(scalar, [a_variable()], (numbers(BATCH), classes(3)), micro_batch_size=2)


def test_weights_are_left_alone():
    model = made(classifier)
    before = model.get_weights()
    oomproof.gradients(
        per_sample(model), model.trainable_variables, (numbers(BATCH), classes(BATCH)), micro_batch_size=5
    )
    for a, b in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)
    assert np.shape(before[-1]) == (CLASSES,)
