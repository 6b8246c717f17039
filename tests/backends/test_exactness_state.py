"""State that layers keep: random seeds, moving statistics, counters."""

import inspect

import keras
import numpy as np
import pytest
from here import crossed, modes, only
from hooks import Faults, Faulty, watched
from keras import layers, ops
from models import (
    BATCH,
    CLASSES,
    FEATURES,
    SAMPLES,
    STEPS,
    check_exact,
    check_same,
    classes,
    classifier,
    compiled,
    force_pieces,
    made,
    numbers,
    regressor,
    snapshot,
    tags,
    train,
    weights,
    words,
)

import oomproof

pytestmark = pytest.mark.usefixtures("float64")

BATCHES = [slice(0, 12), slice(12, 24), slice(24, 29)]


# Random numbers


@pytest.mark.parametrize("mode", modes("graph", "eager"))
def test_dropout_in_one_piece_is_bitwise_the_same(mode):
    def build():
        return classifier(layers.Dropout(0.5), layers.GaussianNoise(0.1))

    expected, received = (train(build, numbers(), classes(), mode=mode, guard=guard) for guard in (None, {}))
    check_same(expected, received, tolerance=0.0)


class Recorder(layers.Layer):
    """Keeps what passed through it, so that a test can see which numbers were drawn."""

    def call(self, x):
        return watched(x, lambda value: self.seen.append(np.array(value)))


def dropout_model(loss, seen):
    recorder = Recorder()
    object.__setattr__(recorder, "seen", seen)
    inner = [layers.Dropout(0.5), recorder, layers.Dense(2)]
    return compiled(keras.Sequential([layers.Input((FEATURES,)), *inner]), loss)


def test_pieces_draw_different_numbers():
    seen = []
    train(
        lambda: dropout_model("mse", seen),
        np.ones((BATCH, FEATURES)),
        numbers(BATCH, 2),
        guard={"micro_batch_size": 4},
        mode="eager",
    )
    masks = {piece.tobytes() for piece in seen if len(piece) == 4}
    assert len(masks) >= 3


def test_both_passes_of_a_gathered_loss_draw_the_same_numbers():
    """A hand-written reference: the gradient at the predictions that were made with these very masks."""
    seen, targets = [], numbers(BATCH, 2, seed=1)

    def scalar(y_true, y_pred):
        return ops.mean(ops.square(y_true - y_pred)) + 0.0 * ops.max(y_pred)

    def build():
        model = dropout_model(scalar, seen)
        return compiled(model, scalar, keras.optimizers.SGD(1.0))

    before = made(build).get_weights()
    after = train(build, np.ones((BATCH, FEATURES)), targets, guard={"micro_batch_size": 4}, mode="eager")
    pieces = [piece for piece in seen if len(piece) == 4]
    assert [p.tobytes() for p in pieces[-3:]] == [p.tobytes() for p in pieces[-6:-3]]
    inputs = np.concatenate(pieces[-3:])
    kernel, bias = before
    error = 2 * (inputs @ kernel + bias - targets) / targets.size
    np.testing.assert_allclose(after["kernel"], kernel - inputs.T @ error, atol=1e-12)


def test_seeds_advance_with_every_batch():
    model = oomproof.guard(made(lambda: classifier(layers.Dropout(0.5, seed=1))), micro_batch_size=3)
    seen = []
    for _ in range(3):
        model.train_on_batch(numbers(BATCH), classes(BATCH))
        (generator,) = model.layers[1]._seed_generators
        seen.append(tuple(ops.convert_to_numpy(generator.state.value)))
    assert len(set(seen)) == 3


class UnseededNoise(layers.Layer):
    """Draws from Keras's global generator, which belongs to no layer."""

    def call(self, x, training=False):
        return x + watched(keras.random.normal(ops.shape(x)), lambda value: self.seen.append(np.array(value)))


@only("tensorflow", "torch", because="random numbers from Keras's global generator")
def test_pieces_draw_different_numbers_from_the_global_generator():
    seen = []

    def build():
        noise = UnseededNoise()
        object.__setattr__(noise, "seen", seen)
        return compiled(keras.Sequential([layers.Input((FEATURES,)), noise, layers.Dense(2)]), "mse")

    train(build, numbers(BATCH), numbers(BATCH, 2), guard={"micro_batch_size": 4}, mode="eager")
    pieces = [piece for piece in seen if len(piece) == 4][-3:]
    assert len({piece.tobytes() for piece in pieces}) == 3


# BatchNormalization


def advanced(moving, batches, momentum, count=1):
    """Moving mean and variance after batches of (samples, features), each seen `count` times."""
    mean, variance = moving
    for batch in batches:
        for _ in range(count):
            mean = mean * momentum + batch.mean(0) * (1 - momentum)
            variance = variance * momentum + batch.var(0) * (1 - momentum)
    return mean, variance


def normalised(momentum=0.9, **options):
    inner = [layers.BatchNormalization(momentum=momentum, name="bn"), layers.Dense(CLASSES, "softmax")]
    return compiled(keras.Sequential([layers.Input((FEATURES,)), *inner]), **options)


@pytest.mark.parametrize(("mode", "loss"), crossed(modes("graph", "eager"), ["sparse_categorical_crossentropy", None]))
def test_moving_statistics_advance_once_a_batch(mode, loss):
    def build():
        own = loss or (lambda y, p: ops.mean(ops.square(ops.cast(y, p.dtype) - p[:, 0])))
        return normalised(loss=own)

    # Far from zero, where the pooled variance would lose digits if it were taken naively.
    data = numbers() + 1000.0
    received = train(build, data, classes(), guard={"micro_batch_size": 5}, mode=mode)
    mean, variance = advanced((0.0, 1.0), [data[b] for b in BATCHES], 0.9)
    np.testing.assert_allclose(received["moving_mean"], mean, rtol=1e-9)
    np.testing.assert_allclose(received["moving_variance"], variance, rtol=1e-7)


def test_masked_statistics_count_valid_steps():
    frames = numbers(SAMPLES * STEPS).reshape(SAMPLES, STEPS, FEATURES)
    frames = np.where(words()[..., None] > 0, frames, 0.0)

    def build():
        inner = [layers.Masking(), layers.BatchNormalization(momentum=0.9), layers.Dense(CLASSES, "softmax")]
        return compiled(keras.Sequential([layers.Input((STEPS, FEATURES)), *inner]))

    received = train(build, frames, tags(), guard={"micro_batch_size": 4})
    valid = [frames[b][words()[b] > 0] for b in BATCHES]
    mean, variance = advanced((0.0, 1.0), valid, 0.9)
    # Keras adds 1e-7 to the number of valid steps.
    np.testing.assert_allclose(received["moving_mean"], mean, atol=1e-7)
    np.testing.assert_allclose(received["moving_variance"], variance, atol=1e-7)


def test_layer_used_twice_advances_twice():
    def build():
        a, b = layers.Input((FEATURES,)), layers.Input((FEATURES,))
        shared = layers.BatchNormalization(momentum=0.9)
        merged = layers.Add()([shared(a), shared(b)])
        return compiled(keras.Model([a, b], layers.Dense(CLASSES, "softmax")(merged)))

    first, second = numbers(), numbers(seed=1) + 5.0
    received = train(build, [first, second], classes(), guard={"micro_batch_size": 4})
    mean, variance = advanced((0.0, 1.0), [data[b] for b in BATCHES for data in (first, second)], 0.9)
    np.testing.assert_allclose(received["moving_mean"], mean, rtol=1e-9)
    np.testing.assert_allclose(received["moving_variance"], variance, rtol=1e-9)


def test_renormalised_statistics_advance_once_a_batch():
    if "renorm" not in inspect.signature(layers.BatchNormalization).parameters:
        pytest.skip("this Keras has no batch renormalisation")

    def build():
        inner = [layers.BatchNormalization(renorm=True, name="bn"), layers.Dense(CLASSES, "softmax")]
        return compiled(keras.Sequential([layers.Input((FEATURES,)), *inner]))

    # Statistics of the first layer depend on the data alone, so those of plain training are the reference.
    expected, received = (train(build, numbers(), classes(), guard=guard) for guard in (None, {"micro_batch_size": 5}))
    names = [name for name in expected.variables if "moving" in name or name.endswith(("renorm_mean", "renorm_stddev"))]
    assert len(names) == 5
    for name in names:
        np.testing.assert_allclose(received.variables[name], expected.variables[name], atol=1e-12, err_msg=name)


def test_frozen_statistics_are_exact():
    def build():
        model = classifier(layers.BatchNormalization(name="bn"))
        model.get_layer("bn").trainable = False
        return compiled(model)

    check_exact(build, numbers(), classes())


def test_whole_batches_are_exact_with_batch_statistics():
    expected, received = (train(normalised, numbers(), classes(), guard=guard) for guard in (None, {}))
    check_same(expected, received, tolerance=1e-15)


def test_exact_forbids_batch_statistics_before_anything_changes():
    model = made(normalised)
    model.train_on_batch(numbers(BATCH), classes(BATCH))
    before = snapshot(model)
    oomproof.guard(model, micro_batch_size=4, allow="exact")
    with pytest.raises(oomproof.CannotFitError, match="BatchNormalization"):
        model.fit(numbers(), classes(), batch_size=BATCH, verbose=0)
    for name, value in snapshot(model).items():
        np.testing.assert_array_equal(value, before[name], err_msg=name)


def test_caveat_is_told_and_recorded(caplog):
    model = oomproof.guard(made(normalised), micro_batch_size=4)
    run = model.fit(numbers(), classes(), batch_size=BATCH, verbose=1).run
    assert any("bn" in caveat for caveat in run.plan.caveats)
    assert sum("bn" in record.message for record in caplog.records) == 1


# Other state


class Counts(layers.Layer):
    """Counts calls and keeps a running mean: state of a kind that nobody knows."""

    def build(self, shape):
        self.calls = self.add_weight(shape=(), dtype="int64", initializer="zeros", trainable=False, name="calls")
        self.running = self.add_weight(shape=(shape[-1],), initializer="zeros", trainable=False, name="running")

    def call(self, x, training=False):
        if training:
            self.calls.assign_add(1)
            self.running.assign(0.9 * self.running + 0.1 * ops.mean(x, axis=0))
        return x


@pytest.mark.parametrize(
    "loss", ["mse", lambda y_true, y_pred: ops.mean(ops.square(y_true - y_pred))], ids=["mse", "scalar"]
)
def test_state_of_own_layers(loss):
    check_exact(lambda: regressor(Counts(), loss=loss), numbers(), numbers(width=2, seed=1), sample_weight=None)


class Copies(layers.Layer):
    """Assigns one variable to another after writing it."""

    def build(self, shape):
        self.last = self.add_weight(shape=(shape[-1],), initializer="zeros", trainable=False, name="last")
        self.copy = self.add_weight(shape=(shape[-1],), initializer="zeros", trainable=False, name="copy")

    def call(self, x, training=False):
        if training:
            self.last.assign(self.last + ops.mean(x, axis=0))
            self.copy.assign(self.last)
        return x


@pytest.mark.parametrize("mode", modes("graph", "eager"))
def test_variable_assigned_to_another(mode):
    check_exact(lambda: classifier(Copies()), numbers(), classes(), mode=mode)


def test_spectral_normalisation():
    """Its state depends on weights alone, and is the same after every piece."""
    check_exact(lambda: classifier(layers.SpectralNormalization(layers.Dense(4))), numbers(), classes())


def test_evaluation_leaves_statistics_alone():
    model = oomproof.guard(made(normalised))
    model.fit(numbers(), classes(), batch_size=BATCH, verbose=0)
    before = snapshot(model)
    force_pieces(model, 3)
    model.evaluate(numbers(), classes(), batch_size=BATCH, sample_weight=weights(), verbose=0)
    model.predict(numbers(), batch_size=BATCH, verbose=0)
    for name, value in snapshot(model).items():
        np.testing.assert_array_equal(value, before[name], err_msg=name)


class CountsOutside(layers.Layer):
    """Counts calls in a variable that is not Keras's, inside of another function."""

    def __init__(self):
        super().__init__()
        import tensorflow as tf

        self.count, self.only_read = (tf.Variable(0.0, dtype=self.dtype) for _ in range(2))
        self.counted = tf.function(lambda x: x + 0.0 * self.count.assign_add(1.0))

    def call(self, x):
        return self.counted(x) + self.only_read


@pytest.mark.proven
@only("tensorflow", because="variables that are not Keras's")
@pytest.mark.parametrize("mode", modes("graph", "eager"))
def test_variables_that_are_not_kerass_are_named(mode):
    data = numbers(BATCH), numbers(BATCH, 2, seed=1)
    model = made(lambda: regressor(CountsOutside()), mode)
    (counting,) = (layer for layer in model.layers if isinstance(layer, CountsOutside))
    counting.count.assign(5.0)
    oomproof.guard(model, micro_batch_size=4, allow="exact")
    with pytest.raises(oomproof.CannotFitError, match=r"counts_outside\.count"):
        model.fit(*data, batch_size=BATCH, verbose=0)
    assert float(counting.count) == 5.0
    oomproof.unguard(model)
    run = oomproof.guard(model, micro_batch_size=4).fit(*data, batch_size=BATCH, verbose=0).run
    (caveat,) = run.plan.caveats
    assert "counts_outside.count" in caveat
    assert float(counting.count) == 8.0  # Once for each piece, and not for looking at it.


@only("tensorflow", because="variables that are not Keras's")
def test_variables_that_are_not_kerass_are_put_back_when_a_piece_fails():
    faults = Faults()
    model = oomproof.guard(made(lambda: regressor(CountsOutside(), Faulty(faults))), micro_batch_size=4)
    (counting,) = (layer for layer in model.layers if isinstance(layer, CountsOutside))
    data = numbers(BATCH), numbers(BATCH, 2, seed=1)
    model.fit(*data, batch_size=BATCH, verbose=0)
    before = float(counting.count)
    faults.arm("forward", 2, ValueError("a fault of the test"))
    with pytest.raises(Exception, match="a fault of the test"):
        model.fit(*data, batch_size=BATCH, verbose=0)
    assert float(counting.count) == before


@pytest.mark.parametrize("mode", modes("graph", "eager"))
def test_evaluating_builds_an_optimizer_where_keras_does(mode):
    built = []
    for guarded in (False, True):
        model = made(classifier, mode)
        if guarded:
            oomproof.guard(model)
        model.evaluate(numbers(), classes(), verbose=0)
        built.append(model.optimizer.built)
        model.fit(numbers(), classes(), verbose=0)
        assert int(model.optimizer.iterations) > 0
    assert built[0] == built[1]
