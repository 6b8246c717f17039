"""Random numbers in pieces: each piece draws what the whole batch would have drawn for its samples."""

import json
import threading

import keras
import numpy as np
import pytest
import recompute_models as recompute
from here import BACKEND, SLOW_COMPILES, USUAL, modes, only
from keras import layers, ops
from keras.src import backend as keras_backend
from models import BATCH, FEATURES, SAMPLES, check_same, classes, classifier, compiled, made, numbers, train

import oomproof
from oomproof import _backends as backends
from oomproof._backends.common.draws import SHARED, Draw, DrawTable, Rows, table_of

MODES = modes(*([USUAL] if SLOW_COMPILES else ["graph", "eager", "xla"]))
# Per backend, those that draw other numbers in pieces.
NOT_BY_ROWS = {"tensorflow": {"categorical", "gamma"}, "jax": {"gamma"}}.get(BACKEND)

DRAWS = {
    "normal": lambda shape, **kind: keras.random.normal(shape, 0.5, 2.0, **kind),
    "uniform": lambda shape, **kind: keras.random.uniform(shape, -1.0, 3.0, **kind),
    "truncated_normal": lambda shape, **kind: keras.random.truncated_normal(shape, 0.5, 2.0, **kind),
    "dropout": lambda shape, dtype, seed: keras.random.dropout(ops.ones(shape, dtype), 0.3, seed=seed),
    "randint": lambda shape, dtype, seed: keras.random.randint(shape, 3, 1000, "int32", seed=seed),
    "categorical": lambda shape, dtype, seed: keras.random.categorical(ops.ones((shape[0], 5), dtype), 3, seed=seed),
    "gamma": lambda shape, **kind: keras.random.gamma(shape, 2.0, **kind),
}


class Drawn(layers.Layer):
    """Gives random numbers, in training and not: for each sample `rows` rows of a shape."""

    def __init__(self, function, row=(), rows=1, dtype=None, seed=5, **options):
        super().__init__(**options)
        self.function, self.row, self.rows, self.kind = function, row, rows, dtype or keras.config.floatx()
        self.seed_generator = keras.random.SeedGenerator(seed)

    def call(self, x):
        samples = ops.shape(x)[0]
        shape = (samples * self.rows, *self.row)
        numbers = DRAWS[self.function](shape, dtype=self.kind, seed=self.seed_generator)
        return ops.reshape(ops.cast(numbers, keras.config.floatx()), (samples, -1))


def drawing(*functions, **options):
    """A model whose output is what it has drawn."""
    inputs = keras.Input((FEATURES,))
    drawn = [Drawn(function, **options)(inputs) for function in functions]
    return keras.Model(inputs, layers.Concatenate()([*drawn, drawn[0]]))


def in_pieces(build, samples, pieces, mode):
    """What a model predicts for one batch: whole, and in pieces; and its seeds after each."""
    results = []
    for number in (1, pieces):
        model = made(build, mode)
        step = backends.current().step(model)
        data = backends.current().as_batch(numbers(samples).astype(keras.config.floatx()), None, None)[:1]
        step.prepare(data, "predict")
        predicted = ops.convert_to_numpy(step.predict(data, number))
        seeds = [ops.convert_to_numpy(v.value) for v in model.non_trainable_variables]
        results.append((np.array(predicted), seeds))
    np.testing.assert_array_equal(results[0][1], results[1][1])
    return results[0][0], results[1][0], step


@only("tensorflow", "jax", because="random numbers of the whole batch in its pieces")
@pytest.mark.parametrize("mode", MODES)
# Rows of odd sizes begin between two counts of a generator, and XLA pairs other neighbours in each of these.
@pytest.mark.parametrize(("samples", "row"), [(11, (5, 7)), (12, (3,)), (7, ()), (5, (13, 3))])
def test_rows_of_the_whole_batch(samples, row, mode):
    functions = [name for name in DRAWS if name not in NOT_BY_ROWS]
    whole, pieces, step = in_pieces(lambda: drawing(*functions, row=row), samples, 3, mode)
    if mode == "eager":
        np.testing.assert_array_equal(whole, pieces)
    # Compiled for another size, the last bit may be rounded in another way.
    np.testing.assert_allclose(whole, pieces, rtol=3e-6, atol=3e-6)
    assert step.engine.other_numbers() == ()


@only("tensorflow", "jax", because="random numbers of the whole batch in its pieces")
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
@pytest.mark.parametrize("function", ["normal", "uniform", "truncated_normal", "dropout"])
def test_rows_in_every_precision(request, function, dtype):
    if dtype == "float64":
        request.getfixturevalue("float64")
    whole, pieces, _ = in_pieces(lambda: drawing(function, row=(7,), dtype=dtype), 11, 4, "eager")
    np.testing.assert_array_equal(whole, pieces)


@only("tensorflow", "jax", because="random numbers of the whole batch in its pieces")
def test_several_rows_for_each_sample():
    whole, pieces, _ = in_pieces(lambda: drawing("normal", row=(3,), rows=5), 11, 4, "eager")
    np.testing.assert_array_equal(whole, pieces)


@pytest.mark.parametrize("function", ["gamma", "categorical", "uniform"])
def test_what_cannot_be_drawn_by_rows_is_named_and_differs_between_pieces(function):
    if NOT_BY_ROWS is None or function in NOT_BY_ROWS:
        _, pieces, step = in_pieces(lambda: drawing(function, row=(9,), name="drawn"), 12, 3, "eager")
        assert step.engine.other_numbers() == ("drawn",)
        assert len({part.tobytes() for part in np.split(pieces, 3)}) == 3


# Models


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


@only("tensorflow", "jax", because="random numbers of the whole batch in its pieces")
@pytest.mark.parametrize(("case", "mode"), TRAININGS)
def test_training_in_pieces_is_training_whole(float64, case, mode):
    build, data = CASES[case]
    expected = train(build, data(), classes(), mode="xla" if mode == "xla" else "eager")
    received = train(build, data(), classes(), mode=mode, guard={"micro_batch_size": 5})
    check_same(expected, received)


@only("tensorflow", "jax", because="random numbers of the whole batch in its pieces")
@pytest.mark.parametrize("mode", MODES)
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
    assert step.other_numbers(data) == (("drops",) if NOT_BY_ROWS is None else ())
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


@only("tensorflow", because="graphs that are traced to be looked at")
def test_looking_at_draws_keeps_no_batch(monkeypatch):
    """A graph lives until the garbage is collected, and what it has captured with it."""
    import tensorflow as tf

    graphs, plain = [], tf.__internal__.FuncGraph

    def kept(*args, **options):
        graphs.append(plain(*args, **options))
        return graphs[-1]

    monkeypatch.setattr(tf.__internal__, "FuncGraph", kept)
    model = made(lambda: classifier(layers.Dropout(0.5)), USUAL)
    oomproof.guard(model, micro_batch_size=200, verbose=0)
    x = np.zeros((1000, FEATURES), "float32")
    model.fit(x, np.zeros(1000), batch_size=1000, verbose=0)
    captured = [t for graph in graphs for t in graph.external_captures if isinstance(t, tf.__internal__.EagerTensor)]
    assert len(graphs) >= 2
    assert {tensor.dtype for tensor in captured} == {tf.resource}


@only("jax", because="programs planned by XLA")
def test_no_more_is_drawn_than_a_piece_needs():
    import jax

    from oomproof._backends.jax.compiled import Program
    from oomproof._backends.jax.state import live_state

    model = made(lambda: drawing("normal", "dropout", "randint", row=(8,)), "graph")
    step = backends.current().step(model)
    data = (jax.numpy.zeros((4099, FEATURES)),)
    step.prepare(data, "predict")
    step.other_numbers(data, training=False)
    live = live_state(model)
    compute = step._compute(Program(None, True, live.variables), "predict", 1, live, 4099)
    values = [variable._value for variable in live.variables]
    program = jax.jit(compute).lower(values, step.engine.take(data, 0, 4), np.int32(8)).as_text()
    assert "xor" in program
    assert "4099" not in program
    # Where the numbers depend on how many are drawn, it says so.
    jax.config.update("jax_threefry_partitionable", False)
    try:
        assert len(step.engine.other_numbers()) == 3
    finally:
        jax.config.update("jax_threefry_partitionable", True)


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


# The table


def test_table_says_what_belongs_to_samples():
    first = [
        Draw("0", "normal", (2, 4)),
        Draw("0", "normal", (3, 4)),
        Draw("1", "uniform", (6,)),
        Draw("2", "gamma", ()),
    ]
    second = [
        Draw("0", "normal", (3, 4)),
        Draw("0", "normal", (3, 4)),
        Draw("1", "uniform", (9,)),
        Draw("2", "gamma", ()),
    ]
    table = table_of(first, 2, second, 3)
    assert table.rows_per_sample(Draw("0", "normal", (5, 4))) is None  # Two kinds that look the same.
    assert table.rows_per_sample(Draw("1", "uniform", (30,))) == 3
    assert table.rows_per_sample(Draw("2", "gamma", ())) == SHARED
    assert table.rows_per_sample(Draw("7", "gamma", ())) is None
    assert DrawTable.from_dict(json.loads(json.dumps(table.to_dict()))) == table


def test_table_knows_longer_sequences():
    shapes = [[Draw("0", "dropout", (n, 5, 4)), Draw("0", "dropout", (n, 8))] for n in (2, 3)]
    table = table_of(shapes[0], 2, shapes[1], 3)
    assert table.rows_per_sample(Draw("0", "dropout", (2, 9, 4))) == 1


def test_table_admits_what_it_cannot_tell():
    pairs = [
        (Draw("0", "normal", (2, 2)), Draw("0", "normal", (3, 3))),
        (Draw("0", "normal", (2,)), Draw("0", "normal", (5,))),
    ]
    for few, more in pairs:
        assert table_of([few], 2, [more], 3).rows_per_sample(few) is None
    often = table_of([Draw("0", "normal", (2,))], 2, [Draw("0", "normal", (3,))] * 2, 3)
    assert often.rows_per_sample(Draw("0", "normal", (2,))) is None
    with pytest.raises(ValueError, match="two different numbers"):
        table_of([], 2, [], 2)


# Keras's functions


def functions():
    return dict(vars(keras_backend.random))


def test_keras_is_left_as_it_was():
    before = functions()
    model = oomproof.guard(made(lambda: classifier(layers.Dropout(0.5)), "eager"), micro_batch_size=5)
    model.fit(numbers(), classes(), batch_size=BATCH, verbose=0)
    assert functions() == before


def test_other_threads_draw_as_ever():
    model = made(lambda: classifier(layers.Dropout(0.5)), "eager")
    engine = backends.current().step(model).engine
    expected, received = keras.random.normal((4, 3), seed=1), []
    engine.draws = table_of([Draw("seed 1", "normal", (2, 3))], 2, [Draw("seed 1", "normal", (3, 3))], 3)
    with engine.drawing(Rows(4, 4, 12)):
        thread = threading.Thread(target=lambda: received.append(keras.random.normal((4, 3), seed=1)))
        thread.start()
        thread.join()
        mine = keras.random.normal((4, 3), seed=1)
    np.testing.assert_array_equal(ops.convert_to_numpy(received[0]), ops.convert_to_numpy(expected))
    assert not np.array_equal(ops.convert_to_numpy(mine), ops.convert_to_numpy(expected))
