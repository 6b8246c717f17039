"""The proof: it says exact where that is so, and planted mistakes do not get past it."""

import keras
import numpy as np
import pytest
from here import BACKEND, USUAL, only
from keras import layers, ops
from models import BATCH, FEATURES, STEPS, WORDS, classes, classifier, compiled, made, numbers, tags, words

import oomproof
from oomproof._backends.common import losses, streaming
from oomproof._backends.common.model import written_by_update
from oomproof._backends.common.split_batch import PieceWrites
from oomproof._records.exactness import Exactness
from oomproof._training import proof_cache


def trained(build, x, y, **options):
    """What a guarded training in unequal pieces says of itself."""
    model = made(build, USUAL)
    oomproof.guard(model, **{"micro_batch_size": 5, **options})
    return model.fit(x, y, batch_size=BATCH, verbose=0, shuffle=False).run


@pytest.fixture(autouse=True)
def nothing_remembered(tmp_path, monkeypatch):
    monkeypatch.setenv("OOMPROOF_CACHE_DIR", str(tmp_path))


class Positions(layers.Layer):
    """Tokens and positions, as in every transformer of Keras's examples."""

    def __init__(self):
        super().__init__()
        self.tokens, self.positions = layers.Embedding(WORDS, 4), layers.Embedding(STEPS, 4)

    def call(self, x):
        return self.tokens(x) + self.positions(ops.arange(STEPS))


class Centres(layers.Layer):
    """Mixes the samples of a batch."""

    def call(self, x):
        return x - ops.mean(x, axis=0, keepdims=True)


def embedded():
    x = layers.Input((STEPS,), dtype="int32")
    return compiled(keras.Model(x, layers.Dense(3, "softmax")(Positions()(x))), optimizer="adam")


class Penalty(layers.Layer):
    """Adds a loss of the kind it is told."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def call(self, x, training=None):
        self.add_loss(self.function(x, training))
        return x


def penalised(function):
    return lambda: classifier(Penalty(function))


# What is said


def test_ordinary_models_are_exact():
    run = trained(classifier, numbers(BATCH), classes(BATCH))
    assert run.exactness == Exactness()
    assert "training: exact" in str(run)
    assert run.plan.exactness == Exactness()


def test_random_layers_are_exact_where_pieces_draw_what_the_batch_would():
    run = trained(lambda: classifier(layers.Dropout(0.5, seed=1, name="drops")), numbers(BATCH), classes(BATCH))
    if BACKEND == "torch":
        assert run.exactness.word == "exact but for random numbers"
        assert "drops" in str(run.exactness)
    else:
        assert run.exactness == Exactness()


@pytest.mark.parametrize("verbose", [0, 1])
def test_what_is_not_exact_warns_whatever_verbose_is(verbose):
    model = oomproof.guard(made(lambda: classifier(layers.BatchNormalization(name="norm"))), micro_batch_size=5)
    with pytest.warns(oomproof.InexactWarning, match="norm"):
        history = model.fit(numbers(BATCH), classes(BATCH), batch_size=BATCH, verbose=verbose)
    assert history.run.exactness.word == "not exact"


def test_whole_batches_are_exact_without_a_proof(monkeypatch):
    monkeypatch.setattr(
        "oomproof._training.proving.Proving.__call__", lambda *_: pytest.fail("nothing is to be proven")
    )
    run = trained(
        lambda: classifier(layers.BatchNormalization()), numbers(BATCH), classes(BATCH), micro_batch_size="auto"
    )
    assert run.exactness == Exactness()


@pytest.mark.parametrize("optimizer", ["sgd", "nadam", "scaled nadam"])
def test_nothing_changes_while_it_is_proven(optimizer):
    """Weights, slots, statistics, seeds and metrics after a training are those of plain Keras: see the other suites.

    Here a proof is made and nothing else.
    """
    from oomproof import _backends as backends

    def build():
        model = classifier(layers.Dropout(0.5), layers.GaussianNoise(0.1))
        inner = keras.optimizers.get(optimizer.removeprefix("scaled "))
        # Keras does not list what Nadam keeps when it is wrapped.
        model.compile(
            keras.optimizers.LossScaleOptimizer(inner) if "scaled" in optimizer else inner,
            "sparse_categorical_crossentropy",
        )
        return model

    model = made(build)
    backend = backends.current()
    data = backend.as_batch(numbers(BATCH), classes(BATCH), None)[:2]
    step = backend.step(model)
    step.prepare(data, "train")
    variables = [*model.variables, *written_by_update(model.optimizer), *model.metrics_variables]
    before = [np.array(ops.convert_to_numpy(v.value)) for v in variables]
    assert step.prove(data, 5, cut=True).holds
    for variable, value in zip(variables, before, strict=True):
        np.testing.assert_array_equal(ops.convert_to_numpy(variable.value), value, err_msg=variable.path)


def test_nothing_changes_where_it_is_not_exact():
    """What differs is looked at with weights that are rounded."""
    from oomproof import _backends as backends

    model = made(lambda: classifier(Centres(), layers.Dropout(0.5)))
    backend = backends.current()
    data = backend.as_batch(numbers(BATCH), classes(BATCH), None)[:2]
    step = backend.step(model)
    step.prepare(data, "train")
    before = [np.array(ops.convert_to_numpy(v.value)) for v in model.variables]
    assert "differs by" in str(step.prove(data, 5, cut=True))
    for variable, value in zip(model.variables, before, strict=True):
        np.testing.assert_array_equal(ops.convert_to_numpy(variable.value), value, err_msg=variable.path)


@pytest.mark.parametrize("optimizer", ["adafactor", "lion", "rmsprop", "nadam", "scaled adafactor"])
def test_a_gradient_of_nothing_but_rounding_is_no_evidence_whatever_is_made_of_it(optimizer):
    """That of the bias of attention's keys is zero. These optimizers make whole steps of it."""

    def build():
        x = layers.Input((STEPS, 4))
        y = layers.Dense(3)(layers.GlobalAveragePooling1D()(layers.MultiHeadAttention(2, 4)(x, x)))
        model = keras.Model(x, y)
        inner = keras.optimizers.get(optimizer.removeprefix("scaled "))
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.LossScaleOptimizer(inner) if "scaled" in optimizer else inner, loss)
        return model

    x = np.random.default_rng(0).normal(size=(BATCH, STEPS, 4)).astype("float32")
    assert trained(build, x, classes(BATCH)).exactness == Exactness()


# Losses that layers add

KINDS = {
    "mean": lambda x, training: ops.mean(ops.square(x)),
    "sum": lambda x, training: ops.sum(ops.square(x)),
    "sum in training, mean in inference": lambda x, training: (
        ops.sum(ops.square(x)) if training else ops.mean(ops.square(x))
    ),
}
ODD = {
    "masked mean": lambda x, training: (
        ops.sum(ops.square(x) * ops.cast(x > 0, x.dtype)) / (ops.sum(ops.cast(x > 0, x.dtype)) + 1e-9)
    ),
    "product of means": lambda x, training: ops.mean(x) * ops.mean(ops.square(x)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_added_losses_that_go_together(kind):
    x, y = numbers(BATCH), classes(BATCH)
    assert trained(penalised(KINDS[kind]), x, y, allow="exact").exactness == Exactness()
    plain, guarded = (made(penalised(KINDS[kind]), USUAL) for _ in range(2))
    oomproof.guard(guarded, micro_batch_size=5)
    logs = [m.fit(x, y, batch_size=BATCH, epochs=2, verbose=0, shuffle=False).history for m in (plain, guarded)]
    np.testing.assert_allclose(logs[0]["loss"], logs[1]["loss"], rtol=1e-4)


@pytest.mark.parametrize("kind", ODD)
def test_added_losses_that_do_not(kind):
    with pytest.raises(oomproof.CannotFitError, match="add_loss"):
        trained(penalised(ODD[kind]), numbers(BATCH), classes(BATCH), allow="exact")
    assert trained(penalised(ODD[kind]), numbers(BATCH), classes(BATCH)).exactness.word == "not exact"


def test_a_sum_that_is_zero_on_the_samples_that_were_looked_at():
    """Where the proof cannot tell a sum from a mean, the first batch does: pieces against smaller ones."""
    x, y = numbers(BATCH), classes(BATCH)
    # The samples a proof takes are spread over the batch; all of these are far from the threshold.
    x = np.clip(x, -1, 1).astype("float32")
    x[1], x[BATCH // 2 + 1] = 3.0, -4.0

    def hinge(x, training):
        return ops.sum(ops.relu(ops.abs(x[:, 0]) - 2.0))

    def build():
        inputs = layers.Input((FEATURES,))
        return compiled(keras.Model(inputs, layers.Dense(3, "softmax")(Penalty(hinge)(inputs))))

    plain, guarded = made(build, USUAL), oomproof.guard(made(build, USUAL), micro_batch_size=5)
    logs = [m.fit(x, y, batch_size=BATCH, verbose=0, shuffle=False) for m in (plain, guarded)]
    np.testing.assert_allclose(logs[0].history["loss"], logs[1].history["loss"], rtol=1e-5)


@pytest.mark.parametrize("size", [5, 1])
def test_a_masked_mean_whose_mask_is_full_at_first(size):
    """Later batches are looked at, too, where a loss of the model's own was judged by the data."""
    x, y = np.abs(numbers(3 * BATCH)) + 0.1, classes(3 * BATCH)
    x[[BATCH, BATCH + 3]] *= -1

    def masked(x, training):
        valid = ops.cast(x[:, 0] > 0, x.dtype)
        return ops.sum(ops.square(x[:, 0]) * valid) / ops.maximum(ops.sum(valid), 1.0)

    def build():
        inputs = layers.Input((FEATURES,))
        return compiled(keras.Model(inputs, layers.Dense(3, "softmax")(Penalty(masked)(inputs))))

    assert trained(build, x[:BATCH], y[:BATCH], micro_batch_size=size).exactness == Exactness()
    with pytest.warns(oomproof.InexactWarning, match="pieces give another loss"):
        run = trained(build, x, y, micro_batch_size=size)
    assert run.exactness.word == "not exact"
    with pytest.raises(oomproof.CannotFitError, match="pieces give another loss"):
        trained(build, x, y, micro_batch_size=size, allow="exact")


# Planted mistakes, which the proof itself has to see


def assert_caught(build, x, y, **options):
    for known in proof_cache.folder().glob("*.json"):
        known.unlink()  # Of the code without the mistake.
    with pytest.raises(oomproof.CannotFitError, match="not exact"):
        trained(build, x, y, allow="exact", **options)
    assert trained(build, x, y, **options).exactness.word == "not exact"


def test_a_wrong_share_is_caught(monkeypatch):
    monkeypatch.setattr(streaming, "share_of", lambda size, batch_size: 1 / 3)
    assert_caught(classifier, numbers(BATCH), classes(BATCH))


def test_a_mean_for_a_sum_is_caught(monkeypatch):
    monkeypatch.setattr(losses, "added_loss_splits_as", lambda *_: "mean")
    assert_caught(penalised(KINDS["sum"]), numbers(BATCH), classes(BATCH))


@only("tensorflow", because="sparse gradients")
def test_rows_that_are_not_added_are_caught(monkeypatch):
    assert trained(embedded, words(BATCH), tags(BATCH), allow="exact").exactness == Exactness()
    monkeypatch.setattr("oomproof._backends.tensorflow.step.may_be_sparse", lambda model: False)
    assert_caught(embedded, words(BATCH), tags(BATCH))


def test_other_seeds_in_the_second_pass_are_caught(monkeypatch):
    """Gathering runs each piece twice; what it draws must be the same both times."""

    def build():
        return classifier(layers.GaussianNoise(0.5, seed=3), loss=_own_loss)

    if BACKEND != "torch":
        assert trained(build, numbers(BATCH), classes(BATCH), allow="exact").exactness == Exactness()
    monkeypatch.setattr(PieceWrites, "for_piece", _with_other_seeds(PieceWrites.for_piece))
    assert_caught(build, numbers(BATCH), classes(BATCH))


def _own_loss(y, p):
    return keras.losses.sparse_categorical_crossentropy(y, p)


def _with_other_seeds(plain):
    calls = []

    def for_piece(self, state):
        calls.append(None)
        pairs = plain(self, state)
        return [(v, value + len(calls) if i < self.seeds else value) for i, (v, value) in enumerate(pairs)]

    return for_piece


def test_a_layer_that_mixes_samples_is_caught():
    assert_caught(lambda: classifier(Centres()), numbers(BATCH), classes(BATCH))


# Paid once


def test_a_proof_is_remembered(monkeypatch):
    asked = []
    plain = proof_cache.ProofCache.remember
    monkeypatch.setattr(
        proof_cache.ProofCache, "remember", lambda self, key, facts: (asked.append(key), plain(self, key, facts))
    )
    for _ in range(2):
        keras.utils.clear_session()
        assert trained(classifier, numbers(BATCH), classes(BATCH)).exactness == Exactness()
    assert len(asked) == 1


def test_and_made_anew_for_another_loss(monkeypatch):
    asked = []
    monkeypatch.setattr(proof_cache.ProofCache, "remember", lambda self, key, facts: asked.append(key))
    for reduction in ("sum", "sum_over_batch_size"):
        keras.utils.clear_session()
        loss = keras.losses.SparseCategoricalCrossentropy(reduction=reduction)
        trained(lambda loss=loss: classifier(loss=loss), numbers(BATCH), classes(BATCH))
    assert len(set(asked)) == 2


class Scaled(layers.Layer):
    """Its settings are nowhere to be read."""

    def __init__(self, by):
        super().__init__()
        self.by = by

    def call(self, x):
        return self.by * x


def own_activation(x):
    return ops.tanh(x)


@pytest.mark.parametrize(
    "own",
    [lambda: Scaled(2.0), lambda: layers.Lambda(lambda x: 2 * x), lambda: layers.Dense(4, activation=own_activation)],
    ids=["layer", "lambda", "activation"],
)
def test_what_depends_on_code_of_the_users_is_not_remembered(own, monkeypatch):
    asked = []
    monkeypatch.setattr(proof_cache.ProofCache, "remember", lambda self, key, facts: asked.append(key))
    assert trained(lambda: classifier(own()), numbers(BATCH), classes(BATCH)).exactness == Exactness()
    assert not asked


def test_a_proof_that_cannot_run_breaks_no_training(monkeypatch):
    monkeypatch.setattr("oomproof._backends.common.step.proven", lambda *_, **__: 1 / 0)
    run = trained(classifier, numbers(BATCH), classes(BATCH))
    assert run.exactness.word == "not exact"
    assert "ZeroDivisionError" in str(run.exactness)
    with pytest.raises(oomproof.CannotFitError, match="ZeroDivisionError"):
        trained(classifier, numbers(BATCH), classes(BATCH), allow="exact")
