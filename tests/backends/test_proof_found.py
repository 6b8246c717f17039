"""What an attack on the word "exact" found: each was said to be exact and was not, or the other way round."""

import keras
import numpy as np
import pytest
from here import only
from keras import layers, ops
from models import BATCH, FEATURES, STEPS, WORDS, classes, classifier, compiled, made, numbers, words
from test_proof import trained

import oomproof


@pytest.fixture(autouse=True)
def nothing_remembered(tmp_path, monkeypatch):
    monkeypatch.setenv("OOMPROOF_CACHE_DIR", str(tmp_path))


def plain_and_guarded(build, data, size, epochs=1, **options):
    """(plain model, its history, guarded model, its history)."""
    plain, guarded = made(build), oomproof.guard(made(build), **{"micro_batch_size": 3, **options})
    found = []
    for model in (plain, guarded):
        found += [model, model.fit(*data, batch_size=size, epochs=epochs, shuffle=False, verbose=0)]
    return found


def weights_agree(one, other):
    return all(
        np.allclose(a, b, rtol=1e-9, atol=1e-12) for a, b in zip(one.get_weights(), other.get_weights(), strict=True)
    )


@only("tensorflow", because="sparse gradients")
@pytest.mark.parametrize("clipping", [{"clipnorm": 5.0}, {"global_clipnorm": 5.0}, {"clipvalue": 2.0}, {}])
def test_a_kernel_for_sparse_inputs_has_each_row_once(float64, clipping):
    import tensorflow as tf

    rng = np.random.default_rng(0)
    x = rng.normal(size=(24, 6)) * (rng.random((24, 6)) > 0.3)
    # Clipping begins after the batch that the proof sees.
    y = rng.normal(size=(24, 1)) * np.where(np.arange(24) < 8, 0.01, 50.0)[:, None]
    data = tf.data.Dataset.from_tensor_slices((tf.sparse.from_dense(x), y)).batch(8)

    def build():
        model = keras.Sequential([keras.Input((6,), sparse=True), layers.Dense(4), layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.01, **clipping), "mse")
        return model

    plain, _, guarded, history = plain_and_guarded(build, (data,), None, allow="exact")
    assert history.run.exactness.word == "exact"
    assert weights_agree(plain, guarded)


class TokensAndPlaces(layers.Layer):
    """One table for tokens, which belong to samples, and for places, which all samples share."""

    def __init__(self):
        super().__init__()
        self.table = layers.Embedding(WORDS, 4)

    def call(self, x):
        return self.table(x) + self.table(ops.arange(STEPS))


@only("tensorflow", because="sparse gradients")
@pytest.mark.parametrize(("clipping", "word"), [({"global_clipnorm": 1e6}, "not exact"), ({}, "exact")])
def test_rows_of_both_kinds_in_one_gradient_are_named_where_clipping_sees_them(clipping, word):
    def build():
        model = keras.Sequential([keras.Input((STEPS,), dtype="int32"), TokensAndPlaces(), layers.Dense(3)])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(0.01, **clipping), loss)
        return model

    y = np.zeros((BATCH, STEPS), "int32")
    _, _, _, history = plain_and_guarded(build, (words(BATCH), y), BATCH)
    assert history.run.exactness.word == word
    assert ("rows that samples share" in str(history.run.exactness)) == (word != "exact")


class Counting(keras.losses.Loss):
    """Keeps a variable that no model knows of."""

    def __init__(self):
        super().__init__()
        self.count = keras.Variable(1.0, trainable=False)

    def call(self, y_true, y_pred):
        self.count.assign(self.count * 1.1)
        return ops.mean(ops.square(ops.cast(y_true, y_pred.dtype) - y_pred), axis=-1) * self.count


@only("jax", because="variables that Keras hands to no step")
@pytest.mark.parametrize("micro", ["auto", 3])
def test_what_keras_forgets_is_forgotten(micro):
    def build():
        model = keras.Sequential([keras.Input((5,)), layers.Dense(1)])
        model.compile("sgd", Counting())
        return model

    rng = np.random.default_rng(0)
    data = rng.normal(size=(20, 5)).astype("float32"), rng.normal(size=(20, 1)).astype("float32")
    # The last batch is a short one: another program, made later.
    plain, one, guarded, other = plain_and_guarded(build, data, 8, epochs=2, micro_batch_size=micro)
    np.testing.assert_allclose(one.history["loss"], other.history["loss"], rtol=1e-5)
    assert float(guarded.loss.count.value) == float(plain.loss.count.value) == 1.0


class FineTuned(keras.Model):
    """A trainable base that is called as in inference, as when a model is fine-tuned."""

    def __init__(self, training):
        super().__init__()
        self.base = keras.Sequential([layers.Dense(4), layers.BatchNormalization()])
        self.head, self.in_training = layers.Dense(3, "softmax"), training

    def call(self, x):
        return self.head(self.base(x, training=self.in_training))


@pytest.mark.parametrize(("training", "word"), [(False, "exact"), (True, "not exact")])
def test_statistics_count_where_they_are_used(training, word):
    def build():
        model = FineTuned(training)
        model.compile("sgd", "sparse_categorical_crossentropy")
        return model

    _, _, _, history = plain_and_guarded(build, (numbers(BATCH), classes(BATCH)), BATCH)
    assert history.run.exactness.word == word


class MixingLater(layers.Layer):
    """Begins to mix samples when it has been called a few times."""

    def build(self, shape):
        self.calls = self.add_weight(shape=(), initializer="zeros", trainable=False)

    def call(self, x, training=False):
        if training:
            self.calls.assign(1.0 - 0.9 * (1.0 - self.calls))
        return x - ops.cast(self.calls > 0.15, x.dtype) * ops.mean(x, axis=0, keepdims=True)


def test_code_with_a_state_is_looked_at_again():
    data = numbers(6 * BATCH), classes(6 * BATCH)
    with pytest.warns(oomproof.InexactWarning, match="pieces give another"):
        _, _, _, history = plain_and_guarded(lambda: classifier(MixingLater()), data, BATCH, micro_batch_size=5)
    assert history.run.exactness.word == "not exact"


def test_a_model_for_batches_of_one_size_is_refused():
    model = keras.Sequential([keras.Input(batch_shape=(8, STEPS, 2)), layers.LSTM(3, stateful=True), layers.Dense(1)])
    model.compile("sgd", "mse", run_eagerly=True)
    oomproof.guard(model, micro_batch_size=3)
    with pytest.raises(oomproof.CannotFitError, match="batches of 8 alone"):
        model.fit(np.zeros((8, STEPS, 2), "float32"), np.zeros((8, 1), "float32"), batch_size=8, verbose=0)


@pytest.mark.parametrize("options", [{}, {"plan": "recomputed"}])
def test_a_sequential_model_that_is_built_by_its_first_batch(float64, options):
    """Off TensorFlow it keeps the size of that batch in its inputs, and takes others all the same."""

    def build():
        inner = [layers.Conv1D(4, 2, activation="relu"), layers.Dropout(0.2), layers.Flatten(), layers.Dense(1)]
        model = keras.Sequential(inner)
        model.compile("adam", "mse")
        return model

    if options:
        options = {"plan": oomproof.Plan(micro_batch_size=3, recompute=("conv1d",)), "micro_batch_size": "auto"}
    keras.backend.clear_session()
    x = np.random.default_rng(0).normal(size=(20, STEPS, 2))
    plain, _, guarded, history = plain_and_guarded(build, (x, x[:, 0, :1]), 8, **options)
    assert history.run.plan.micro_batch_size == 3
    assert history.run.exactness.holds
    if history.run.exactness.word == "exact":
        assert weights_agree(plain, guarded)


class OfOneSize(layers.Layer):
    """Has a weight for each sample of a batch."""

    def build(self, shape):
        self.offset = self.add_weight(shape=shape, initializer="zeros")

    def call(self, x):
        return x + self.offset


def test_a_layer_with_a_weight_for_each_sample_is_refused():
    model = keras.Sequential([keras.Input(batch_shape=(8, 2)), OfOneSize(), layers.Dense(1)])
    model.compile("sgd", "mse", run_eagerly=True)
    oomproof.guard(model, micro_batch_size=3)
    with pytest.raises(oomproof.CannotFitError, match="batches of 8 alone"):
        model.fit(np.zeros((8, 2), "float32"), np.zeros((8, 1), "float32"), batch_size=8, verbose=0)


class Compared(layers.Layer):
    """Each sample with the next one."""

    def call(self, x):
        return x - ops.roll(x, 1, axis=0)


def test_a_model_that_depends_on_the_order_of_samples_is_caught(monkeypatch):
    """By the proof itself: another order gives another outcome, which must not pass for rounding."""
    monkeypatch.setattr("oomproof._backends.common.step.ModelStep.look", lambda *_, **__: None)
    run = trained(lambda: classifier(Compared()), numbers(BATCH), classes(BATCH))
    assert run.exactness.word == "not exact"
    assert "depends on the order of the samples" in str(run.exactness)


class MixingMany(layers.Layer):
    """Mixes samples where there are more of them than in a proof or in a piece."""

    def call(self, x):
        mean = ops.mean(x, axis=0, keepdims=True)
        return x - ops.cast(ops.sum(ops.ones_like(x[:, 0])) > 7, x.dtype) * mean


def test_what_begins_with_more_samples_than_a_piece_has_is_seen_in_two_pieces():
    run = trained(lambda: classifier(MixingMany()), numbers(BATCH), classes(BATCH))
    assert run.exactness.word == "not exact"
    assert "larger ones" in str(run.exactness)


@pytest.mark.parametrize("room", [0, None])
def test_no_more_is_looked_at_than_there_is_room_for(monkeypatch, room):
    """A look that runs out of memory is ten seconds lost on TensorFlow."""
    from oomproof._backends.common.step import ModelStep

    sizes, compare = [], ModelStep._forward_disagreements
    monkeypatch.setattr("oomproof._training.proving.Proving._room", lambda self: room)

    def comparing(self, data, pieces, others):
        sizes.append(-(-self.batch_size(data) // others))
        return compare(self, data, pieces, others)

    monkeypatch.setattr(ModelStep, "_forward_disagreements", comparing)
    run = trained(lambda: classifier(MixingMany()), numbers(BATCH), classes(BATCH))
    assert (max(sizes) > run.plan.micro_batch_size) == (room is None)


def test_an_output_about_all_samples_of_a_batch_is_refused():
    def build():
        first, second = layers.Input((FEATURES,)), layers.Input((FEATURES,))
        similar = ops.matmul(layers.Dense(4)(first), ops.transpose(layers.Dense(4)(second)))
        return compiled(keras.Model([first, second], similar), loss=lambda y, p: ops.mean(p, axis=-1))

    with pytest.raises(oomproof.UnsupportedModelError, match="2 × 2 for fewer"):
        trained(build, [numbers(BATCH), numbers(BATCH)], np.zeros((BATCH, 1), "float32"))


@pytest.mark.parametrize("seed", [None, 1])
@pytest.mark.parametrize("recompute", [(), ("drops",), ("conv1d..drops",)])
@pytest.mark.parametrize("micro", [None, 5])
def test_a_dropout_is_found_again_in_pieces_and_when_it_is_recomputed(seed, recompute, micro):
    """On torch one without a seed draws from another generator, and by where a convolution leaves its numbers."""

    def build():
        inner = [layers.Conv1D(4, 2, name="conv1d"), layers.Dropout(0.4, seed=seed, name="drops"), layers.Flatten()]
        return compiled(keras.Sequential([keras.Input((STEPS, 2)), *inner, layers.Dense(3, "softmax")]))

    data = np.random.default_rng(0).normal(size=(BATCH, STEPS, 2))
    plan = oomproof.Plan(recompute=recompute, micro_batch_size=micro)
    run = trained(build, data, classes(BATCH), plan=plan, micro_batch_size="auto")
    assert run.plan.recompute == recompute
    assert run.exactness.holds


@pytest.mark.parametrize("mixes", [False, True])
@pytest.mark.parametrize("allow", ["default", "exact"])
def test_predictions_in_pieces_of_a_model_that_mixes_samples(mixes, allow, monkeypatch, recwarn):
    x = layers.Input((FEATURES,))
    inner = ops.tanh(layers.Dense(4)(x))
    mixed = inner - ops.mean(inner, axis=0, keepdims=True) if mixes else inner
    model = compiled(keras.Model(x, layers.Dense(3, "softmax")(mixed)))
    whole = model.predict(numbers(BATCH), batch_size=BATCH, verbose=0)
    oomproof.guard(model, allow=allow)
    monkeypatch.setattr("oomproof._training.training.Training.pieces", lambda self, batch: 4)
    if mixes and allow == "exact":
        with pytest.raises(oomproof.CannotFitError, match="predictions of pieces"):
            model.predict(numbers(BATCH), batch_size=BATCH, verbose=0)
        return
    for _ in range(2):
        pieces = model.predict(numbers(BATCH), batch_size=BATCH, verbose=0)
    model.evaluate(numbers(BATCH), classes(BATCH), batch_size=BATCH, verbose=0)
    assert np.allclose(whole, pieces, atol=1e-5) != mixes
    told = [str(warning.message) for warning in recwarn if warning.category is oomproof.InexactWarning]
    assert len(told) == mixes
    assert all("evaluating and predicting are not exact" in text for text in told)
