"""Every form of data that Keras takes, and every way to run a batch."""

import keras
import numpy as np
import pytest
from here import modes, only
from keras import layers
from models import (
    BATCH,
    CLASSES,
    FEATURES,
    SAMPLES,
    STEPS,
    WORDS,
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
    tagger,
    tags,
    train,
    weights,
    words,
)

import oomproof

pytestmark = pytest.mark.usefixtures("float64")
# Every size other than the one before it, and one smaller than a piece.
BOUNDS = [(0, 12), (12, 19), (19, 20), (20, 29)]


def batches(*arrays):
    return [tuple(array[start:stop] for array in arrays) for start, stop in BOUNDS]


class Batches(keras.utils.PyDataset):
    def __init__(self, found):
        super().__init__()
        self.found = found

    def __len__(self):
        return len(self.found)

    def __getitem__(self, index):
        return self.found[index]


def dataset(*arrays):
    """A tf.data dataset of batches of several sizes."""
    import tensorflow as tf

    specs = tuple(tf.TensorSpec((None, *array.shape[1:]), array.dtype) for array in arrays)
    return tf.data.Dataset.from_generator(lambda: iter(batches(*arrays)), output_signature=specs)


SOURCES = {
    "PyDataset": lambda *arrays: Batches(batches(*arrays)),
    "generator": lambda *arrays: (batch for batch in batches(*arrays)),
    "tf.data of unknown batch size": dataset,
}


@pytest.mark.parametrize("source", SOURCES)
def test_batches_of_several_sizes(source):
    def run(guard, mode):
        data = SOURCES[source](words(), tags(), weights(SAMPLES, STEPS))
        return train(lambda: tagger(metrics=["accuracy"]), data, guard=guard, mode=mode, shuffle=False)

    check_same(run(None, "eager"), run({"micro_batch_size": 4}, "graph"))


@pytest.mark.parametrize("drop", [False, True])
def test_tf_data_batched(drop):
    import tensorflow as tf

    def run(guard, mode):
        data = tf.data.Dataset.from_tensor_slices((numbers(), classes())).batch(BATCH, drop_remainder=drop).prefetch(1)
        return train(classifier, data, guard=guard, mode=mode)

    check_same(run(None, "graph"), run({"micro_batch_size": 5}, "graph"))


@only("tensorflow", because="ragged tensors as inputs")
def test_ragged_inputs():
    import tensorflow as tf

    def build():
        x = layers.Input((None,), dtype="int32")
        return compiled(keras.Model(x, layers.Dense(CLASSES, "softmax")(layers.Lambda(as_dense)(x))))

    def as_dense(x):
        dense = x.to_tensor(shape=(None, STEPS)) if isinstance(x, tf.RaggedTensor) else x
        return tf.reduce_mean(tf.one_hot(tf.cast(dense, "int32"), WORDS, dtype="float64"), axis=1)

    def data():
        rows = tf.ragged.constant([[w for w in row if w] for row in words()], dtype="int32")
        return tf.data.Dataset.from_tensor_slices((rows, classes())).batch(BATCH)

    def run(guard, mode):
        return train(build, data(), guard=guard, mode=mode)

    check_same(run(None, "eager"), run({"micro_batch_size": 4}, "graph"))


@only("tensorflow", "jax", because="sparse tensors as inputs")
def test_sparse_inputs():
    import tensorflow as tf

    def build():
        x = layers.Input((FEATURES,), sparse=True)
        return compiled(keras.Model(x, layers.Dense(CLASSES, "softmax")(x)))

    def run(guard, mode):
        inputs = tf.sparse.from_dense(np.where(numbers() > 0, numbers(), 0.0))
        data = tf.data.Dataset.from_tensor_slices((inputs, classes())).batch(BATCH)
        return train(build, data, guard=guard, mode=mode)

    check_same(run(None, "eager"), run({"micro_batch_size": 4}, "graph"))


class MayBeAlone(keras.Model):
    """Takes a dict of which one part may be missing."""

    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(CLASSES, "softmax")

    def call(self, inputs):
        return self.dense(inputs["a"] if inputs["b"] is None else inputs["a"] + inputs["b"])


@pytest.mark.parametrize("missing", [False, True])
def test_dict_with_none(missing):
    inputs = {"a": numbers(), "b": None if missing else numbers(seed=1)}
    check_exact(lambda: compiled(MayBeAlone()), inputs, classes())


@pytest.mark.parametrize("kind", [list, tuple])
def test_list_and_tuple_of_inputs(kind):
    def build():
        inputs = [layers.Input((FEATURES,)), layers.Input((FEATURES,))]
        return compiled(keras.Model(inputs, layers.Dense(CLASSES, "softmax")(layers.Add()(inputs))))

    check_exact(build, kind([numbers(), numbers(seed=1)]), classes())


def test_single_precision_data_and_integer_targets():
    check_exact(regressor, numbers().astype("float32"), np.arange(SAMPLES * 2).reshape(SAMPLES, 2) % 5)


@pytest.mark.parametrize(
    "steps", [1, pytest.param(3, marks=only("tensorflow", "jax", because="`steps_per_execution` above 1"))]
)
def test_steps_per_execution(steps):
    expected, received = check_exact(
        lambda: classifier(steps_per_execution=steps, metrics=["accuracy"]),
        numbers(53),
        classes(53),
        epochs=2,
        validation_data=(numbers(seed=5), classes(seed=6)),
        plain_mode="graph",
    )
    assert received["iteration"] == expected["iteration"] == 10


def test_steps_per_epoch_and_initial_epoch():
    def run(guard, mode):
        data = Batches(batches(numbers(), classes()) * 2)
        return train(
            classifier, data, guard=guard, mode=mode, shuffle=False, steps_per_epoch=4, epochs=4, initial_epoch=2
        )

    check_same(run(None, "eager"), run({"micro_batch_size": 3}, "graph"))


@pytest.mark.parametrize("mode", modes("graph", "eager"))
def test_on_batch_methods(mode):
    def run(guarded):
        model = made(lambda: classifier(metrics=["accuracy"]), mode)
        if guarded:
            oomproof.guard(model)
            force_pieces(model, 4)
        logs = []
        for start, stop in BOUNDS:
            x, y = numbers()[start:stop], classes()[start:stop]
            logs.append(model.train_on_batch(x, y, sample_weight=weights()[start:stop], return_dict=True))
            logs.append(model.test_on_batch(x, y, return_dict=True))
            logs.append({"predictions": model.predict_on_batch(x)})
        model.train_on_batch(numbers(), classes(), class_weight={0: 1.0, 1: 2.0, 2: 3.0})
        return logs, snapshot(model)

    (expected_logs, expected), (received_logs, received) = run(False), run(True)
    for a, b in zip(expected_logs, received_logs, strict=True):
        assert list(a) == list(b)
        for name in a:
            np.testing.assert_allclose(a[name], b[name], atol=1e-9, err_msg=name)
    for name, value in expected.items():
        np.testing.assert_allclose(value, received[name], atol=1e-9, err_msg=name)


def several():
    x = layers.Input((STEPS,), dtype="int32")
    h = layers.Embedding(WORDS, 4, mask_zero=True)(x)
    outputs = {"tag": layers.Dense(CLASSES, "softmax", name="tag")(h), "sum": layers.Dense(1, name="sum")(h[:, 0])}
    model = keras.Model(x, outputs)
    return compiled(model, {"tag": "sparse_categorical_crossentropy", "sum": "mse"}, metrics={"tag": ["accuracy"]})


EVALUATED = {
    "streamed": lambda: (lambda: tagger(metrics=["accuracy"]), words(), tags()),
    "gathered": lambda: (lambda: regressor(loss=keras.losses.Dice(), metrics=["mae"]), numbers(), numbers(width=2)),
    "regularised": lambda: (lambda: classifier(layers.Dense(4, kernel_regularizer="l2")), numbers(), classes()),
    "several outputs": lambda: (several, words(), {"tag": tags(), "sum": numbers(width=1)}),
}


@pytest.mark.parametrize("case", EVALUATED)
def test_evaluate_and_predict_in_pieces(case):
    build, x, y = EVALUATED[case]()
    plain, guarded = made(build), oomproof.guard(made(build))
    force_pieces(guarded, 5)
    options = {"batch_size": BATCH, "verbose": 0}
    expected, received = (m.evaluate(x, y, return_dict=True, **options) for m in (plain, guarded))
    assert expected == pytest.approx(received, abs=1e-9)
    expected, received = (keras.tree.flatten(m.predict(x, **options)) for m in (plain, guarded))
    for a, b in zip(expected, received, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-9)


def test_unguarded_model_goes_on_as_before():
    def run(guarded):
        model = made(classifier)
        if guarded:
            oomproof.guard(model, micro_batch_size=4)
        model.fit(numbers(), classes(), batch_size=BATCH, shuffle=False, verbose=0)
        oomproof.unguard(model)
        model.fit(numbers(), classes(), batch_size=BATCH, shuffle=False, verbose=0)
        return snapshot(model)

    expected, received = run(False), run(True)
    for name, value in expected.items():
        np.testing.assert_allclose(value, received[name], atol=1e-9, err_msg=name)
