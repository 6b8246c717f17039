"""Random numbers in pieces: each piece draws what the whole batch would have drawn for its samples."""

import json
import threading

import keras
import numpy as np
import pytest
from here import BACKEND, SLOW_COMPILES, USUAL, crossed, modes, only
from keras import layers, ops
from keras.src import backend as keras_backend
from models import BATCH, FEATURES, classes, classifier, made, numbers

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
# Rows of odd sizes begin between two counts of a generator, and XLA pairs other neighbours in each of these.
@pytest.mark.parametrize(("shape", "mode"), crossed([(11, (5, 7)), (12, (3,)), (7, ()), (5, (13, 3))], MODES))
def test_rows_of_the_whole_batch(shape, mode):
    samples, row = shape
    functions = [name for name in DRAWS if name not in NOT_BY_ROWS]
    whole, pieces, step = in_pieces(lambda: drawing(*functions, row=row), samples, 3, mode)
    if mode == "eager":
        np.testing.assert_array_equal(whole, pieces)
    # Compiled for another size, the last bit may be rounded in another way.
    np.testing.assert_allclose(whole, pieces, rtol=3e-6, atol=3e-6)
    assert step.engine.other_numbers() == ()


@only("tensorflow", "jax", because="random numbers of the whole batch in its pieces")
@pytest.mark.parametrize(
    ("dtype", "function"),
    crossed(["float16", "bfloat16", "float64"], ["normal", "uniform", "truncated_normal", "dropout"]),
)
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
