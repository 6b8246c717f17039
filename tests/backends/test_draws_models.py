"""Models that draw random numbers train in pieces as they train whole."""

import keras
import numpy as np
import pytest
import recompute_models as recompute
from here import BACKEND, SLOW_COMPILES, USUAL, modes, only, representative
from keras import layers, ops
from models import BATCH, FEATURES, SAMPLES, check_same, classes, classifier, compiled, made, numbers, train

from oomproof import _backends as backends
from oomproof._backends.common.draws import Rows

# Models


MODES = modes(*([USUAL] if SLOW_COMPILES else ["graph", "eager", "xla"]))


class Sampling(layers.Layer):
    """As in every VAE."""

    def __init__(self):
        super().__init__()
        self.seed_generator = keras.random.SeedGenerator(11)

    def call(self, x):
        mean, log_variance = ops.split(x, 2, axis=-1)
        noise = keras.random.normal(ops.shape(mean), seed=self.seed_generator)
        self.add_loss(ops.mean(ops.square(mean) + ops.exp(log_variance) - log_variance))
        return mean + ops.exp(0.5 * log_variance) * noise


class DropPath(layers.Layer):
    """Stochastic depth."""

    def __init__(self):
        super().__init__()
        self.seed_generator = keras.random.SeedGenerator(12)

    def call(self, x, training=False):
        if not training:
            return x
        shape = (ops.shape(x)[0],) + (1,) * (len(x.shape) - 1)
        return x * ops.floor(0.7 + keras.random.uniform(shape, seed=self.seed_generator))


class SharedNoise(layers.Layer):
    """The same for all samples, and as many rows as a piece may have samples."""

    def __init__(self, **options):
        super().__init__(**options)
        self.seed_generator = keras.random.SeedGenerator(13)

    def call(self, x, training=False):
        noise = keras.random.normal((3, x.shape[-1]), seed=self.seed_generator)
        return x + 0.1 * ops.mean(noise, axis=0) if training else x


def pictures(samples=SAMPLES):
    return np.random.default_rng(0).normal(size=(samples, 6, 6, 2))


def augmenting(loss="sparse_categorical_crossentropy"):
    inputs = keras.Input((6, 6, 2))
    x = layers.RandomFlip(seed=1)(inputs)
    x = layers.RandomContrast(0.4, seed=2)(x)
    x = layers.Conv2D(3, 3, activation="tanh")(x)
    x = layers.SpatialDropout2D(0.3)(x)
    x = layers.Add()([x, DropPath()(layers.Conv2D(3, 3, padding="same")(x))])
    x = layers.GaussianNoise(0.2)(layers.Flatten()(x))
    x = layers.GaussianDropout(0.2)(layers.Dense(7, "selu")(x))
    x = layers.AlphaDropout(0.2)(SharedNoise()(x))
    x = Sampling()(layers.Dense(6, "tanh")(x))
    return compiled(keras.Model(inputs, layers.Dense(3, "softmax")(x)), loss)


def attending():
    inputs = keras.Input((5, FEATURES))
    x = layers.LSTM(3, return_sequences=True, dropout=0.2, recurrent_dropout=0.2)(inputs)
    x = layers.MultiHeadAttention(2, 2, dropout=0.3)(x, x)
    x = layers.Dropout(0.3, noise_shape=(None, 1, 3))(x)
    return compiled(keras.Model(inputs, layers.Dense(3, "softmax")(layers.Flatten()(x))))


def sequences():
    return np.random.default_rng(0).normal(size=(SAMPLES, 5, FEATURES))


def scalar(y_true, y_pred):
    return ops.mean(keras.losses.sparse_categorical_crossentropy(y_true, y_pred)) ** 2


CASES = {
    "augmenting": (augmenting, pictures),
    "attending": (attending, sequences),
    "gathered": (lambda: augmenting(scalar), pictures),
}


# Where a compile takes its time, one of them shows it.
TRAININGS = [("augmenting", mode) for mode in MODES] + [("attending", USUAL), ("gathered", USUAL)]
ESSENTIAL = [("augmenting", "graph"), *TRAININGS[-2:]]


@only("tensorflow", "jax", because="random numbers of the whole batch in its pieces")
@pytest.mark.parametrize("training", representative(TRAININGS, *ESSENTIAL), ids="-".join)
def test_training_in_pieces_is_training_whole(float64, training):
    case, mode = training
    build, data = CASES[case]
    expected = train(build, data(), classes(), mode="xla" if mode == "xla" else "eager")
    received = train(build, data(), classes(), mode=mode, guard={"micro_batch_size": 5})
    check_same(expected, received)


@only("tensorflow", "jax", because="random numbers of the whole batch in its pieces")
@pytest.mark.parametrize("mode", representative(MODES, "graph"))
def test_recomputed_in_pieces(float64, mode):
    data = recompute.CASES[recompute.transformer]
    expected = recompute.trained(recompute.transformer, data, "xla" if mode == "xla" else "eager")
    received = recompute.trained(recompute.transformer, data, mode, recompute.with_gap, pieces=3)
    recompute.check_same(expected, received, 1e-9)


@only("tensorflow", "jax", because="random numbers of the whole batch in its pieces")
def test_evaluating_a_model_that_draws(float64):
    def build():
        inputs = keras.Input((FEATURES,))
        noisy = layers.Dropout(0.5, seed=3)(layers.Dense(5)(inputs), training=True)
        return compiled(keras.Model(inputs, layers.Dense(3, "softmax")(noisy)))

    found = []
    for pieces in (1, 3):
        model = made(build, USUAL)
        recompute.take_over(model, (), pieces)
        found.append(model.evaluate(numbers(), classes(), batch_size=BATCH, verbose=0))
        found[-1:] = [[found[-1], *(ops.convert_to_numpy(v.value) for v in model.non_trainable_variables)]]
    for a, b in zip(*found, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12)


@only("tensorflow", "torch", because="random numbers from Keras's global generator")
def test_global_generator_and_plain_seeds(float64):
    class Unseeded(layers.Layer):
        def call(self, x):
            return x + keras.random.normal(ops.shape(x)) + keras.random.uniform(ops.shape(x), seed=4)

    def build():
        inputs = keras.Input((FEATURES,))
        return compiled(keras.Model(inputs, layers.Dense(3, "softmax")(Unseeded()(inputs))))

    def outcome(guard):
        model = made(build, "eager")
        keras.random.normal((1,))  # It is there before training begins.
        return train(lambda: model, numbers(), classes(), mode="eager", guard=guard)

    expected, received = outcome(None), outcome({"micro_batch_size": 5})
    if BACKEND == "tensorflow":
        check_same(expected, received)
    else:
        step = received.model._oomproof_guard._driver.step
        assert len(step.engine.other_numbers()) == 2


def test_what_a_framework_draws_otherwise_is_named(float64):
    """And what all samples share is drawn as in the whole batch, on all of them."""

    def build():
        return classifier(layers.Dropout(0.5, name="drops"), SharedNoise(name="shares"))

    model = made(build, USUAL)
    step = backends.current().step(model)
    data = backends.current().as_batch(numbers(BATCH), classes(BATCH), None)
    assert step.other_numbers(data) == (("drops",) if BACKEND == "torch" else ())
    check_same(
        *(
            train(lambda: classifier(SharedNoise()), numbers(), classes(), mode=USUAL, guard=guard)
            for guard in (None, {"micro_batch_size": 5})
        )
    )


def test_seeds_end_as_after_the_whole_batch(float64):
    def seeds(guard):
        trained = train(lambda: classifier(layers.Dropout(0.5, seed=1)), numbers(), classes(), mode=USUAL, guard=guard)
        return {name: value for name, value in trained.variables.items() if "seed" in name}

    plain, guarded = seeds(None), seeds({"micro_batch_size": 5})
    assert plain
    for name, value in plain.items():
        np.testing.assert_array_equal(value, guarded[name])


# Numbers of the whole batch, drawn and cut


@pytest.mark.parametrize("case", ["augmenting", "attending"])
def test_numbers_of_the_whole_batch_for_any_samples(float64, case):
    """What the proof of a step rests on: the same samples in pieces, or in another order, with their own numbers."""
    build, data = CASES[case]
    model, x = made(build, "eager"), data()[:7]
    step = backends.current().step(model)
    engine, batch = step.engine, backends.current().as_batch(x, classes(7), None)
    step.prepare(batch, "train")
    step.other_numbers(batch)

    def outputs(samples, rows=None):
        def compute(part):
            if rows is None:
                return engine.run(lambda: (None, [engine.call(part, True)]))
            with engine.drawing(rows, whole=True):
                return engine.run(lambda: (None, [engine.call(part, True)]))

        return ops.convert_to_numpy(step.evaluate(compute, ops.convert_to_tensor(x[samples]))[0])

    whole = outputs(np.arange(7))
    order = np.array([3, 0, 6, 1, 5, 2, 4])
    np.testing.assert_allclose(outputs(order, Rows.of(order, 7)), whole[order], atol=1e-12)
    np.testing.assert_allclose(outputs(np.arange(2, 5), Rows(2, 3, 7)), whole[2:5], atol=1e-12)


@pytest.mark.parametrize("loss", ["sparse_categorical_crossentropy", scalar], ids=["streamed", "gathered"])
def test_pieces_can_draw_the_whole_batch(float64, loss):
    """On every backend, so that everything but the numbers can be compared."""

    def build():
        return classifier(layers.Dropout(0.5), layers.GaussianNoise(0.2), layers.Dropout(0.2, seed=4), loss=loss)

    found = []
    for pieces in (1, 3):
        model = made(build, "eager")
        recompute.take_over(model, (), pieces).engine.draws_whole = True
        keras.utils.set_random_seed(3)
        model.fit(numbers(), classes(), batch_size=BATCH, shuffle=False, verbose=0)
        found.append(model.get_weights())
    for a, b in zip(*found, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-9)
