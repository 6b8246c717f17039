"""The head of a model, its loss and its metrics in parts: the same training as plain Keras's, in less memory."""

import json

import keras
import numpy as np
import oom_memory
import pytest
from head_models import HEADS, MORE_TAGS
from here import BACKEND, SLOW_COMPILES, USUAL, crossed, modes
from recompute_models import (
    BATCH,
    CLASSES,
    IMAGES,
    NUMBERS,
    TAGS,
    WORDS,
    agreed,
    check_same,
    compiled,
    made,
    residual,
    trained,
    transformer,
)

import oomproof
from oomproof import _backends as backends
from oomproof._backends.common import streaming
from oomproof._backends.common.call_graph import graphs
from oomproof._backends.common.head import heads
from oomproof._backends.common.proving import as_array
from oomproof._training.foresight import Foresight

_plain = {}


def nothing(model):
    return ()


def plain(name, mode=USUAL, pieces=None):
    """Training without parts, once for all ways to cut a head."""
    if (name, mode, pieces) not in _plain:
        build, data, _ = HEADS[name]
        segments = None if pieces is None else nothing
        _plain[name, mode, pieces] = agreed(lambda: trained(build, data, mode, segments, pieces or 1))
    return _plain[name, mode, pieces]


def in_parts(name, parts, mode=USUAL, segments=nothing, pieces=1):
    build, data, label = HEADS[name]
    return trained(build, data, mode, segments, pieces, head=(label, parts))


@pytest.mark.parametrize(("name", "parts"), crossed(HEADS, [2, 3, 9]))
def test_the_same_training(float64, name, parts):
    check_same(plain(name), in_parts(name, parts), 1e-10)


@pytest.mark.parametrize(
    ("name", "mode"),
    crossed(["transformer", "several"], modes(*(["graph"] if SLOW_COMPILES else ["graph", "eager", "xla"]))),
)
def test_the_same_training_in_every_mode(float64, name, mode):
    check_same(plain(name, mode), in_parts(name, 3, mode), 1e-10)


@pytest.mark.parametrize(("name", "mode"), crossed(["transformer", "several", "residual"], modes("graph", "eager")))
def test_together_with_pieces(float64, name, mode):
    check_same(plain(name, mode, pieces=2), in_parts(name, 2, mode, pieces=2), 1e-10)


def test_together_with_recomputation(float64):
    segments = ("norm_0..add_0", "relu_1")
    check_same(plain("residual"), in_parts("residual", 3, segments=lambda model: segments), 1e-10)


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "bfloat16", "mixed_float16"])
def test_half_precision(policy):
    """As near to single precision as steps that run whole: sums of parts lose nothing."""
    exact, whole, parts = (
        gradients_of("tied", dtype, head) for dtype, head in [("float32", None), (policy, None), (policy, ("last", 4))]
    )
    for one, other, third in zip(exact, whole, parts, strict=True):
        assert np.abs(other - one).max() > 0  # It was computed in half precision.
        assert np.abs(third - one).max() <= 2 * np.abs(other - one).max() + 0.01 * np.abs(one).max()


def gradients_of(name, policy, head):
    build, (x, y, *_), _ = HEADS[name]
    model = made(in_policy(policy, build), USUAL)
    backend = backends.current()
    step, batch = backend.step(model), backend.as_batch(x, y, None)
    step.prepare(batch, "train")
    step.head = head
    return [as_array(gradient) for gradient in step.step_values(batch, 1).gradients]


def in_policy(policy, build):
    """Makes a model in a dtype policy. Set in `build`: before it Keras forgets all that was set."""

    def built():
        before = keras.config.dtype_policy()
        keras.config.set_dtype_policy(policy)
        try:
            model = build()
        finally:
            keras.config.set_dtype_policy(before)
        assert model.layers[-1].dtype_policy.name == policy
        return model

    return built


@pytest.mark.parametrize(
    ("plan", "what"),
    [
        ({"head": "nothing", "head_parts": 2}, "Expected `head` to be one of .*'tags'.* Received: head='nothing'"),
        ({"head": "attention_1", "head_parts": 2}, "Expected `head` to be one of"),  # Its dropout draws.
        ({"head": "words", "head_parts": 2}, "Expected `head` to be one of"),  # Nothing would be left before it.
        ({"head": "tags", "head_parts": 2, "recompute": ("wide_1..tags",)}, "nothing of the head to be recomputed"),
        ({"head": "tags"}, "Expected `head_parts` to be 2 or more. Received: head_parts=1"),
    ],
)
def test_a_plan_that_cannot_be_followed(plan, what):
    model = made(transformer, USUAL)
    oomproof.guard(model, plan=oomproof.Plan(**plan))
    with pytest.raises(ValueError, match=what):
        model.fit(WORDS, TAGS, batch_size=BATCH, verbose=0)


def test_what_a_plan_says():
    assert oomproof.Plan().head_in_parts is None
    plan = oomproof.Plan(head="tags", head_parts=3, recompute=("wide_0",))
    assert oomproof.Plan.from_json(plan.to_json()) == plan
    assert "the head (tags) in 3 parts" in plan.sentence


@pytest.mark.proven
def test_the_head_of_a_plan_is_proven_and_kept():
    model = made(transformer, USUAL)
    oomproof.guard(model, plan=oomproof.Plan(head="tags", head_parts=3))
    run = model.fit(WORDS, TAGS, batch_size=BATCH, epochs=1, verbose=0).run
    assert (run.plan.head, run.plan.head_parts, run.exactness.word) == ("tags", 3, "exact")


@pytest.mark.proven
def test_a_mistake_in_the_parts_is_found(monkeypatch):
    """Each part with the share that it would have if there were two of one size."""
    monkeypatch.setattr(streaming, "share_of", lambda size, batch_size: 0.5)
    model = made(residual, USUAL)
    oomproof.guard(model, plan=oomproof.Plan(head="head", head_parts=2))
    with pytest.warns(oomproof.InexactWarning, match="with its head in parts"):
        model.fit(IMAGES, CLASSES, batch_size=5, epochs=1, verbose=0)


@pytest.mark.proven
def test_samples_mixed_in_the_head_are_found():
    """A call of nobody's layer, which compares the samples with each other."""

    def build():
        inputs = keras.Input((4,))
        x = keras.layers.Dense(4, name="first")(inputs)
        x = x - keras.ops.mean(x, axis=0, keepdims=True)
        return compiled(keras.Model(inputs, keras.layers.Dense(3, "softmax", name="last")(x)))

    model = made(build, USUAL)
    label = next(call.label for call in next(iter(graphs(model))).calls if call.label.startswith("mean"))
    oomproof.guard(model, plan=oomproof.Plan(head=label, head_parts=2))
    with pytest.warns(oomproof.InexactWarning, match="with its head in parts"):
        model.fit(NUMBERS, CLASSES, batch_size=BATCH, epochs=1, verbose=0)


class Adding(keras.layers.Layer):
    """Adds a loss, which its own code does not show."""

    def call(self, x):
        self.add(x)
        return x

    def add(self, x):
        self.add_loss(keras.ops.mean(x**2))


class Told(Adding):
    def call(self, x):
        self.add_loss(keras.ops.mean(x**2))
        return x


def numbers_through(*middle):
    inputs = keras.Input((4,))
    x = keras.layers.Dense(4, "tanh", name="first")(inputs)
    for layer in middle:
        x = layer(x)
    return compiled(keras.Model(inputs, keras.layers.Dense(3, "softmax", name="last")(x)))


def test_a_loss_that_the_head_adds_is_refused():
    assert heads(numbers_through(Adding(name="adding"))) == ("adding[1]", "last")
    assert heads(numbers_through(Told(name="told"))) == ("last",)
    model = made(lambda: numbers_through(Adding(name="adding")), USUAL)
    oomproof.guard(model, plan=oomproof.Plan(head="adding", head_parts=2))
    with pytest.raises(ValueError, match=r"Expected a head none of whose layers adds a loss.* Received: head='adding'"):
        model.fit(NUMBERS, CLASSES, batch_size=BATCH, verbose=0)


@pytest.mark.proven
def test_a_plan_of_ours_leaves_out_a_head_that_cannot_be_cut(monkeypatch):
    planned = []

    def before(self, batch):
        if not planned:
            planned.append(self._training.follow(oomproof.Plan(head="adding", head_parts=2), batch))

    monkeypatch.setattr(Foresight, "before", before)
    model = made(lambda: numbers_through(Adding(name="adding")), USUAL)
    oomproof.guard(model)
    run = model.fit(NUMBERS, CLASSES, batch_size=BATCH, verbose=0).run
    assert planned == [True]
    assert (run.plan.head, run.exactness.word) == (None, "exact")
    assert any("the plan's head in parts is left out" in event.message for event in run.events)


def test_rows_that_are_not_the_samples_make_no_head():
    """Positions of all samples in one axis, whose size is left open like that of the samples."""
    inputs = keras.Input((5,), dtype="int32")
    x = keras.layers.Embedding(7, 4, name="words")(inputs)
    x = keras.ops.reshape(x, (-1, 4))
    x = keras.layers.Dense(7, name="flat")(x)
    x = keras.ops.reshape(x, (-1, 5, 7))
    model = compiled(keras.Model(inputs, keras.layers.Dense(3, "softmax", name="last")(x)))
    assert [label.partition("[")[0] for label in heads(model)] == ["reshape", "last"]


def test_a_model_that_is_built_by_its_first_batch_has_a_head():
    model = keras.Sequential([keras.layers.Dense(4, name="first"), keras.layers.Dense(3, "softmax", name="last")])
    model(np.zeros((BATCH, 4)))
    assert heads(model) == ("last",)


def tied_by_an_operation():
    """An operation that is no layer computes in the precision of the model around it."""
    inputs = keras.Input((5,), dtype="int32")
    words = keras.layers.Embedding(7, 4, name="words")
    x = keras.layers.Dense(4, "tanh", name="wide")(words(inputs))
    x = (
        Projected(words, name="projected")(x)
        if BACKEND == "jax"
        else keras.ops.einsum("btd,vd->btv", x, words.embeddings)
    )
    return compiled(keras.Model(inputs, x), keras.losses.SparseCategoricalCrossentropy(from_logits=True))


class Projected(keras.layers.Layer):
    """On JAX Keras takes no variable for an operation's argument."""

    def __init__(self, words, **options):
        super().__init__(**options)
        self.words = words

    def call(self, x):
        return keras.ops.einsum("btd,vd->btv", x, self.words.embeddings)


@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16"])
def test_logits_from_the_table_of_words(policy):
    build, data = in_policy(policy, tied_by_an_operation), (WORDS, MORE_TAGS)
    last = heads(made(build, USUAL))[-1]
    whole, parts = (trained(build, data, USUAL, nothing, head=head) for head in (None, (last, 3)))
    check_same(whole, parts, 1e-5 if policy == "float32" else 1e-2)


@pytest.mark.parametrize("what", ["loss", "metric"])
def test_what_wants_all_beside_losses_that_layers_add(float64, what):
    def build():
        model = residual()
        # Of all samples together, which parts cannot know.
        own = lambda y, p: keras.ops.max(keras.losses.sparse_categorical_crossentropy(y, p))  # noqa: E731
        return compiled(model, own) if what == "loss" else compiled(model, metrics=[own])

    data = (IMAGES, CLASSES)
    plain = agreed(lambda: trained(build, data, USUAL))
    check_same(plain, trained(build, data, USUAL, nothing, head=("head", 3)), 1e-10)


@pytest.mark.proven
def test_a_batch_of_one_sample_proves_nothing():
    """Of one sample there are no parts."""
    model = made(transformer, USUAL)
    oomproof.guard(model, plan=oomproof.Plan(head="tags", head_parts=2))
    model.fit(WORDS[:1], TAGS[:1], batch_size=BATCH, verbose=0)
    proofs = vars(model)["_oomproof_guard"]._ready().training.current.proofs
    assert not proofs
    model.fit(WORDS, TAGS, batch_size=BATCH, verbose=0)
    assert [way[2] for way in proofs] == ["tags"]


@pytest.mark.parametrize("what", ["loss", "metric"])
def test_what_wants_all_predictions_gets_them(float64, what):
    def build():
        model = transformer()
        mean = keras.losses.sparse_categorical_crossentropy
        if what == "loss":
            return compiled(model, lambda y, p: keras.ops.mean(mean(y, p)) ** 2)
        return compiled(model, metrics=[lambda y, p: mean(y, p) ** 2])

    data = (WORDS, TAGS)
    check_same(trained(build, data, USUAL), trained(build, data, USUAL, nothing, head=("tags", 3)), 1e-10)


@pytest.mark.parametrize("mode", ["graph"] if BACKEND != "tensorflow" else ["graph", "xla", "eager"])
def test_logits_are_never_all_there(forks, mode):
    environment = oom_memory.environment(BACKEND, 2000)
    whole, parts = json.loads(forks.run("head_child", mode, environment=environment).splitlines()[-1])
    assert whole >= 4 * parts, (whole, parts)
