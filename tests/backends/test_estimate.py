"""`estimate` and `max_batch_size` on each backend: what the figures mean, that they follow what is run, bad input."""

import concurrent.futures
import dataclasses
import json
import sys
import textwrap
import types

import keras
import numpy as np
import pytest
from here import BACKEND
from keras import layers

import oomproof
from oomproof import _simulators as simulators
from oomproof._cli import main as cli
from oomproof._estimation import estimating
from oomproof._estimation.bands import band_of
from oomproof._estimation.cards import limit_of
from oomproof._estimation.engines.base import Answer
from oomproof._estimation.workloads import describe
from oomproof._machine import gpus
from oomproof._records.run import Device
from oomproof._records.trace import Compiled, Target

MIB = 2**20
FIELDS = ("engine", "low", "expected", "high", "limit", "fits", "driver", "by_category", "by_layer", "seconds")


def conv_net(optimizer="adam", **options):
    keras.utils.clear_session(free_memory=False)
    model = keras.Sequential(
        [
            keras.Input((32, 32, 3)),
            layers.Conv2D(16, 3, padding="same", activation="relu", name="first"),
            layers.Conv2D(32, 3, padding="same", activation="relu", name="second"),
            layers.GlobalAveragePooling2D(name="pool"),
            layers.Dense(10, name="head"),
        ],
        name="conv_net",
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, metrics=["accuracy"], **options)
    return model


def wide_net(optimizer):
    """Weights are most of what it takes."""
    keras.utils.clear_session(free_memory=False)
    model = keras.Sequential([keras.Input((512,)), layers.Dense(1024, name="wide"), layers.Dense(1, name="out")])
    model.compile(optimizer, "mse")
    return model


def weights_of(model):
    return sum(int(np.prod(weight.shape)) * 4 for weight in model.trainable_weights)


@pytest.fixture(scope="module")
def found():
    return oomproof.estimate(conv_net(), 512, gpu="t4", engine="trace")


def test_figures_agree_with_each_other(found):
    assert 0 < found.low < found.expected < found.high
    assert found.fits
    assert found.limit < 15 * 2**30
    assert found.driver > found.expected
    assert abs(sum(found.by_category.values()) - found.expected) < 1024
    assert abs(sum(size for _, size in found.by_layer) - found.expected) < 1024
    assert max(found.timeline) <= found.expected
    assert len(found.timeline) <= 500
    assert found.seconds > 0


def test_the_larger_layer_is_named_first(found):
    sizes = dict(found.by_layer)
    # 512 images of 32 × 32 with 32 channels are 64 MiB, and are kept at least once.
    assert sizes["second"] >= 64 * MIB
    assert sizes["second"] > sizes["first"]
    assert [size for _, size in found.by_layer] == sorted(sizes.values(), reverse=True)
    assert sizes.get("", 0) < 0.1 * found.expected


def test_it_goes_to_json_and_back(found):
    text = found.to_json()
    assert oomproof.Estimate.from_json(text) == found
    assert all(field in json.loads(text) for field in FIELDS)


def test_it_prints_as_a_table(found):
    text = str(found)
    for part in ("conv_net, batch 512", "usable on t4", "fits", "by category", "by layer", "second", "nvidia-smi"):
        assert part in text


def test_a_card_that_is_too_small():
    assert oomproof.estimate(conv_net(), 4096, memory="700MiB", engine="trace").fits is False


def test_no_card():
    found = oomproof.estimate(conv_net(), 8, engine="trace")
    assert (found.gpu, found.limit, found.fits, found.driver) == (None, None, None, None)


def test_the_model_is_left_as_it_was():
    model = conv_net()
    before = [weight.copy() for weight in model.get_weights()]
    oomproof.estimate(model, 8, engine="trace")
    assert not model.optimizer.built
    assert model.train_function is None
    for weight, was in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(weight, was)
    x, y = np.ones((8, 32, 32, 3), "float32"), np.zeros((8,), "int32")
    assert np.isfinite(model.fit(x, y, verbose=0).history["loss"]).all()
    # And a model in the middle of its training.
    oomproof.estimate(model, 8, engine="trace")
    assert np.isfinite(model.fit(x, y, verbose=0).history["loss"]).all()
    assert int(model.optimizer.iterations) == 2


def test_it_grows_with_the_batch():
    model = conv_net()
    few, many = (oomproof.estimate(model, size, engine="trace").expected for size in (64, 256))
    assert 3 < many / few < 4.2


def test_optimizers_have_slots():
    adam, sgd = (oomproof.estimate(wide_net(name), 4, engine="trace") for name in ("adam", "sgd"))
    slots = 2 * weights_of(wide_net("sgd"))
    assert adam.by_category["optimizer"] == pytest.approx(slots, rel=0.02)
    assert adam.expected - sgd.expected >= 0.9 * slots
    assert sgd.by_category["weights"] == pytest.approx(slots / 2, rel=0.02)


def test_frozen_layers_take_no_gradients():
    model = wide_net("adam")
    trained = oomproof.estimate(model, 4, engine="trace")
    model.get_layer("wide").trainable = False
    model.compile("adam", "mse")
    frozen = oomproof.estimate(model, 4, engine="trace")
    assert frozen.by_category.get("optimizer", 0) < 0.05 * trained.by_category["optimizer"]
    assert frozen.expected < 0.65 * trained.expected


def test_evaluation_and_prediction_take_less():
    model = conv_net()
    train, test, predict = (
        oomproof.estimate(model, 256, phase=phase, engine="trace") for phase in ("train", "test", "predict")
    )
    assert test.expected < 0.8 * train.expected
    assert predict.expected < 0.8 * train.expected
    assert predict.by_category.get("optimizer", 0) < 1024


def test_pieces_take_less_and_the_batch_stays():
    model = conv_net()
    whole = oomproof.estimate(model, 512, engine="trace")
    pieces = oomproof.estimate(model, 512, micro_batch_size=64, engine="trace")
    assert pieces.micro_batch_size == 64
    assert pieces.expected < 0.3 * whole.expected
    batch = 512 * 32 * 32 * 3 * 4
    # On torch it waits on the host.
    assert BACKEND == "torch" or pieces.by_category["input"] >= batch
    assert oomproof.estimate(model, 64, micro_batch_size=64, engine="trace").micro_batch_size is None


def test_gradients_of_pieces_are_added_up_somewhere():
    model = wide_net("sgd")
    piece = oomproof.estimate(model, 8, engine="trace")
    pieces = oomproof.estimate(model, 64, micro_batch_size=8, engine="trace")
    if BACKEND == "torch":  # Where the step has them anyway; what is added to them is there for a moment.
        assert 0.98 * piece.expected <= pieces.expected < piece.expected + 1.02 * weights_of(model)
    else:
        assert pieces.expected - piece.expected > 0.9 * weights_of(model)


@pytest.mark.parametrize("tuned", [True, False])
def test_what_the_compiler_says_counts_and_the_trace_says_whose_it_is(monkeypatch, tuned):
    said = Compiled(100 * MIB, 60 * MIB, 50 * MIB, 490 * MIB, tuned, 1.0, ("as told",))
    monkeypatch.setattr(simulators, "why_not_compile", lambda backend, workload: None)
    monkeypatch.setattr(simulators, "compiled", lambda backend, model, workload, memory: said)
    found = oomproof.estimate(conv_net(), 64, gpu="t4", jit=True)
    assert (found.engine, found.mode, found.notes) == ("compile", "compiled", ("as told",))
    # On JAX, Keras has the next batch on the GPU already.
    ahead = 64 * (32 * 32 * 3 * 4 + 4) if BACKEND == "jax" else 0
    # What convolutions work in is part of what was compiled on the GPU; otherwise it is modelled, where XLA compiles.
    workspaces = found.expected - 600 * MIB - ahead
    assert workspaces == 0 if tuned or BACKEND == "torch" else workspaces > MIB
    # They may be none, or twice as large.
    band = band_of("compile", BACKEND, "compiled")
    assert found.low == pytest.approx((600 * MIB + ahead) * (1 - band.below))
    assert found.high == pytest.approx((600 * MIB + ahead + 2 * workspaces) * (1 + band.above))
    assert abs(sum(found.by_category.values()) - found.expected) < 1024
    assert dict(found.by_layer)["second"] > 100 * MIB
    with pytest.raises(oomproof.BackendError, match="not compiled by XLA"):
        oomproof.estimate(conv_net(), 64, jit=False, engine="compile")


def test_what_was_compiled_on_the_card_at_hand_is_known_better(monkeypatch):
    monkeypatch.setattr(gpus, "local", lambda: gpus.of_memory("4GiB"))
    monkeypatch.setattr(simulators, "why_not_compile", lambda backend, workload: None)
    said = Compiled(100 * MIB, 60 * MIB, 50 * MIB, 490 * MIB, True, 1.0)
    monkeypatch.setattr(simulators, "compiled", lambda backend, model, workload, memory: said)
    found = oomproof.estimate(conv_net(), 64, jit=True)
    assert found.confidence == band_of("compile", BACKEND, "compiled", tuned=True).confidence
    assert found.high == pytest.approx(1.05 * found.expected)


def test_mixed_precision_takes_less_and_is_taken_back():
    model = conv_net()
    full = oomproof.estimate(model, 256, engine="trace")
    mixed = oomproof.estimate(model, 256, precision="mixed_bfloat16", engine="trace")
    assert (full.precision, mixed.precision) == ("float32", "mixed_bfloat16")
    assert mixed.expected < 0.8 * full.expected
    assert {layer.compute_dtype for layer in model.layers} == {"float32"}


def test_precision_is_that_of_the_layers_also_after_loading(tmp_path):
    """Keras saves the policy of each layer, and not the one of the model."""

    def build():
        model = keras.Sequential([keras.Input((32, 32, 3)), layers.Conv2D(16, 3), layers.Conv2D(16, 3)])
        model.compile("sgd", "mse")
        return model

    def peak(model, precision=None):
        return oomproof.estimate(model, 64, precision=precision, engine="trace").expected

    full = build()
    full.save(tmp_path / "full.keras")
    usual = keras.config.dtype_policy()
    try:
        keras.config.set_dtype_policy("mixed_bfloat16")
        mixed = build()
        mixed.save(tmp_path / "mixed.keras")
        loaded_full = keras.models.load_model(tmp_path / "full.keras")
    finally:
        keras.config.set_dtype_policy(usual)
    loaded_mixed = keras.models.load_model(tmp_path / "mixed.keras")
    assert peak(mixed) < 0.9 * peak(full)
    assert oomproof.estimate(loaded_full, 64, engine="trace").precision == "float32"
    assert peak(loaded_full, "mixed_bfloat16") == peak(mixed)
    assert oomproof.estimate(loaded_mixed, 64, engine="trace").precision == "mixed_bfloat16"
    assert peak(loaded_mixed, "float32") == peak(full)
    assert {layer.compute_dtype for layer in loaded_mixed.layers} == {"bfloat16"}


def several_inputs():
    keras.utils.clear_session(free_memory=False)
    tokens = keras.Input((None,), dtype="int32", name="tokens")
    extra = keras.Input((4,), name="extra")
    hidden = layers.GlobalAveragePooling1D()(layers.Embedding(1000, 64, name="words")(tokens))
    one = layers.Dense(5, name="kind")(hidden)
    two = layers.Dense(1, name="rating")(layers.Concatenate()([hidden, extra]))
    model = keras.Model({"tokens": tokens, "extra": extra}, {"kind": one, "rating": two})
    losses = {"kind": keras.losses.SparseCategoricalCrossentropy(from_logits=True), "rating": "mse"}
    model.compile("adam", losses)
    return model


def test_sequence_lengths():
    model = several_inputs()
    short, long = (
        oomproof.estimate(model, 2048, input_shape={"tokens": (length,)}, engine="trace").expected
        for length in (64, 512)
    )
    assert long > 2 * short
    assert oomproof.estimate(model, 2048, input_shape={"tokens": 64}, engine="trace").expected == short
    # What it tells to do is what works.
    with pytest.raises(ValueError, match=r"'tokens'.*dimension 0 can be anything.*--input-shape tokens=512"):
        oomproof.estimate(model, 256)
    with pytest.raises(ValueError, match=r"2 inputs.*Name those you mean.*--input-shape \w+="):
        oomproof.estimate(model, 256, input_shape=(64,))


# What a step is given


def with_outputs(*names):
    keras.utils.clear_session(free_memory=False)
    x = keras.Input((8,))
    heads = {
        "kind": layers.Dense(5, activation="softmax", name="kind")(x),
        "box": layers.Dense(4, name="box")(x),
    }
    model = keras.Model(x, {name: heads[name] for name in names})
    model.compile("sgd", {"kind": "sparse_categorical_crossentropy", "box": "mse"}, metrics={"box": ["mae"]})
    return model


def test_losses_by_name_whatever_the_order_of_the_outputs():
    one, other = (
        oomproof.estimate(with_outputs(*names), 64, engine="trace") for names in (("kind", "box"), ("box", "kind"))
    )
    assert one.expected == other.expected


def classes(y, p):
    return keras.losses.sparse_categorical_crossentropy(y, p)


class OwnLoss(keras.Model):
    takes: str = "values"

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        if self.takes == "classes":
            return keras.ops.mean(classes(y, y_pred))
        return keras.ops.mean(keras.ops.square((x if self.takes == "nothing" else y) - y_pred))


@pytest.mark.parametrize("loss", ["function", "named", "nothing", "values", "classes"])
def test_targets_are_what_the_loss_takes(loss):
    keras.utils.clear_session(free_memory=False)
    x = keras.Input((512,))
    y = layers.Dense(512, activation="softmax")(x)
    functions = {"function": classes, "named": keras.losses.SparseCategoricalCrossentropy(name="loss")}
    if loss in functions:
        model = keras.Model(x, y)
        model.compile("sgd", functions[loss])
    else:
        model = OwnLoss(x, y)
        model.takes = loss
        model.compile("sgd")
    described = describe(model, 4, "train", False, Target())
    shapes = {"nothing": None, "values": (4, 512)}
    assert getattr(described.y, "shape", None) == shapes.get(loss, (4,))
    assert oomproof.estimate(model, 4, engine="trace").expected > weights_of(model)


def test_a_step_that_fails_says_what_it_was_given():
    keras.utils.clear_session(free_memory=False)
    model = keras.Sequential([keras.Input((16,)), layers.Dense(3)], name="small")
    model.compile("sgd", lambda y, p: keras.ops.matmul(y, keras.ops.ones((77, 5))))
    with pytest.raises((ValueError, TypeError, oomproof.UnsupportedModelError)) as raised:
        oomproof.estimate(model, 8, engine="trace")
    said = "\n".join([str(raised.value), *getattr(raised.value, "__notes__", [])])
    assert "A step of small was tried with x (8, 16) float32, y (8, 3) float32." in said


class OwnStep(keras.Model):
    """Its step is Keras's."""

    def train_step(self, *given):
        return super().train_step(*given)


def test_own_steps_are_estimated_as_they_are_and_not_in_pieces():
    def build(kind):
        keras.utils.clear_session(free_memory=False)
        x = keras.Input((512,))
        model = kind(x, layers.Dense(512, name="wide")(x))
        model.compile("adam", "mse")
        return model

    plain, own = (oomproof.estimate(build(kind), 8, engine="trace") for kind in (keras.Model, OwnStep))
    assert own.expected == plain.expected
    assert oomproof.estimate(build(OwnStep), 8, phase="predict", engine="trace").expected < own.expected
    with pytest.raises(oomproof.UnsupportedModelError, match="train_step"):
        oomproof.estimate(build(OwnStep), 8, micro_batch_size=4, engine="trace")
    with pytest.raises(oomproof.UnsupportedModelError, match="train_step"):
        oomproof.plan(build(OwnStep), 8, budget="1GiB")


def test_convolutions_are_spoken_of_where_there_are_some(found):
    said = [any("convolutions" in note for note in each.notes) for each in (found, estimate_of_wide_net())]
    assert said == [BACKEND != "torch", False]


def estimate_of_wide_net():
    return oomproof.estimate(wide_net("sgd"), 8, engine="trace")


def test_several_threads_at_a_time():
    model = conv_net()
    alone = oomproof.estimate(model, 8, engine="trace").expected
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        together = list(pool.map(lambda _: oomproof.estimate(model, 8, engine="trace").expected, range(3)))
    assert together == [alone] * 3


class Own(keras.Model):
    def __init__(self):
        super().__init__(name="own")
        self.dense = layers.Dense(8)

    def call(self, x):
        return self.dense(x)


def test_a_model_that_is_not_built():
    model = Own()
    model.compile("adam", "mse")
    with pytest.raises(ValueError, match=r"does not say what its inputs look like.*input_shape"):
        oomproof.estimate(model, 4)
    assert oomproof.estimate(model, 4, input_shape=(16,), engine="trace").expected > 0


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"batch_size": 0}, ValueError, "batch_size=0"),
        ({"batch_size": 2.5}, TypeError, "batch_size=2.5"),
        ({"batch_size": True}, TypeError, "batch_size=True"),
        ({"gpu": "rtx-4009"}, ValueError, "rtx-4090"),
        ({"gpu": "t4", "memory": "1GiB"}, ValueError, "not both"),
        ({"memory": "lots"}, ValueError, "24GiB.*memory='lots'"),
        ({"memory": "90%"}, ValueError, "24GiB.*memory='90%'"),
        ({"memory": "24"}, ValueError, "24GiB.*memory='24', which is 24 B"),
        ({"engine": "guess"}, ValueError, 'one of "auto", "compile", "trace"'),
        ({"phase": "dream"}, ValueError, "phase='dream'"),
        ({"precision": "float7"}, ValueError, "precision='float7'"),
        ({"micro_batch_size": -1}, ValueError, "micro_batch_size=-1"),
        ({"input_shape": (3,)}, ValueError, r"\(32, 32, 3\).*\(3,\)"),
        ({"input_shape": (32, 0, 3)}, ValueError, "does not agree|at least 1"),
    ],
    ids=str,
)
def test_bad_arguments(options, error, match):
    with pytest.raises(error, match=match):
        oomproof.estimate(conv_net(), **{"batch_size": 4, **options})


def test_not_a_model_and_not_compiled():
    with pytest.raises(TypeError, match=r"keras.Model"):
        oomproof.estimate("model", 4)
    plain = keras.Sequential([keras.Input((4,)), layers.Dense(1)])
    with pytest.raises(ValueError, match="not compiled"):
        oomproof.estimate(plain, 4)
    assert oomproof.estimate(plain, 4, phase="predict", engine="trace").expected > 0


# What was measured, and what there is


@pytest.mark.parametrize(
    ("known", "here", "fits"),
    [
        ({"measured": True}, False, True),
        ({"tuned": True}, True, True),
        # Planned by another card's autotuner, or by none.
        ({"tuned": True}, False, False),
        ({}, True, False),
    ],
)
def test_a_step_that_went_through_fits_however_little_it_left(monkeypatch, known, here, fits):
    card = {} if here else {"memory": "4GiB"}
    monkeypatch.setattr(gpus, "local", lambda: gpus.of_memory("4GiB"))
    limit = oomproof.estimate(conv_net(), 8, engine="trace", **card).limit

    def answer(question):
        trace = simulators.trace(question.backend, question.model, question.workload)
        # On JAX the batch to come is put on the device, too.
        room = limit - 2 * MIB
        return Answer(trace, peak=room, **known)

    monkeypatch.setattr(
        estimating, "engine_for", lambda name, question: ("probe", types.SimpleNamespace(answer=answer))
    )
    found = oomproof.estimate(conv_net(), 8, engine="probe", **card)
    assert found.expected < limit
    assert found.fits == fits
    assert (found.high <= limit) == fits


@pytest.mark.parametrize("known", [{"tuned": True}, {"measured": True}])
def test_the_largest_batch_is_found_in_few_looks_where_all_that_fits_ends_at_the_limit(monkeypatch, known):
    monkeypatch.setattr(gpus, "local", lambda: gpus.of_memory("4GiB"))
    looked = []

    def answer(question):
        looked.append(question.workload.x.shape[0])
        trace = simulators.trace(question.backend, question.model, question.workload)
        return Answer(trace, peak=100 * MIB + 11 * MIB * looked[-1], **known)

    monkeypatch.setattr(
        estimating, "engine_for", lambda name, question: ("probe", types.SimpleNamespace(answer=answer))
    )
    model = wide_net("sgd")
    found = oomproof.max_batch_size(model, engine="probe")
    limit = oomproof.estimate(model, 1, engine="probe").limit
    assert 0.97 * (limit - 100 * MIB) < 11 * MIB * found <= limit - 100 * MIB
    assert len(looked) <= 9


def test_the_card_at_hand_may_have_less_than_others_of_its_kind():
    card = gpus.find("t4")
    usable = card.usable(BACKEND)

    def limit(at_hand, here=True):
        memory = types.SimpleNamespace(describe=lambda: Device("GPU:0", at_hand, True))
        return limit_of(card, types.SimpleNamespace(name=BACKEND, memory=lambda: memory), here=here)

    assert limit(usable // 2) == usable // 2
    assert limit(2 * usable) == usable
    assert limit(None) == usable
    assert limit(usable // 2, here=False) == usable


# The largest batch


def test_the_largest_batch_fits_and_a_percent_more_does_not():
    model = conv_net()
    # Half a gigabyte is taken by the context on torch, a quarter is left out by JAX.
    options = {"memory": "3GiB", "engine": "trace"}
    size = oomproof.max_batch_size(model, **options)
    assert oomproof.estimate(model, size, **options).fits
    assert not oomproof.estimate(model, size + max(2, size // 50), **options).fits


def test_not_even_one_sample():
    # Hardly more than the frameworks keep back: about 1 MiB is left on JAX, and less than that on the others.
    memory = {"tensorflow": "1786MiB", "jax": "2MiB", "torch": "501MiB"}[BACKEND]
    with pytest.raises(oomproof.CannotFitError, match="One sample at a time needs"):
        oomproof.max_batch_size(wide_net("adam"), memory=memory, engine="trace")


def test_no_card_to_fit_into():
    with pytest.raises(ValueError, match="This machine has none"):
        oomproof.max_batch_size(conv_net())


# The command line


def called(capsys, monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["oomproof", *map(str, arguments)])
    try:
        cli.main()
        code = 0
    except SystemExit as left:
        code = left.code or 0
    printed = capsys.readouterr()
    return code, printed.out, printed.err


@pytest.fixture
def call(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    return lambda *arguments: called(capsys, monkeypatch, *arguments)


def test_a_file(call, tmp_path):
    conv_net().save(tmp_path / "model.keras")
    code, out, _ = call(
        "estimate", "model.keras", "--batch-size", "64", "--gpu", "rtx-4090", "--engine", "trace", "--json"
    )
    answer = json.loads(out)
    assert code == 0
    assert all(field in answer for field in FIELDS)
    assert answer["fits"] is True
    assert call("estimate", "model.keras", "--batch-size", "4096", "--memory", "600MiB", "--engine", "trace")[0] == 3


def test_the_precision_of_a_file(call, tmp_path):
    conv_net().save(tmp_path / "model.keras")
    arguments = ("estimate", "model.keras", "--batch-size", "256", "--engine", "trace", "--json")
    full, mixed = (
        json.loads(call(*arguments, *more)[1])["expected"] for more in ((), ("--precision", "mixed_bfloat16"))
    )
    assert mixed < 0.8 * full


def test_a_file_that_says_it_is_not_compiled(call, tmp_path):
    conv_net(jit_compile=False).save(tmp_path / "model.keras")
    _, out, _ = call("estimate", "model.keras", "--batch-size", "4", "--engine", "trace")
    assert ("jit_compile=False" in out) == (BACKEND == "jax")
    _, out, _ = call("estimate", "model.keras", "--batch-size", "4", "--engine", "trace", "--jit")
    assert "jit_compile=False" not in out


def test_no_traceback_for_a_model_that_fails(call, tmp_path):
    (tmp_path / "my_failing.py").write_text(
        textwrap.dedent("""
        import keras

        def build_model():
            model = keras.Sequential([keras.Input((16,)), keras.layers.Dense(4)], name="small")
            model.compile("sgd", lambda y, p: keras.ops.matmul(y, keras.ops.ones((77, 5))))
            return model
        """)
    )
    code, _, err = call("estimate", "my_failing:build_model", "--batch-size", "4", "--engine", "trace")
    assert code == 2
    assert "A step of small was tried with x (4, 16) float32" in " ".join(err.split())


def test_a_function_and_several_sizes(call, tmp_path):
    (tmp_path / "my_training.py").write_text(
        textwrap.dedent("""
        import keras

        def build_model():
            model = keras.Sequential([keras.Input((16,)), keras.layers.Dense(4)])
            model.compile("sgd", "mse")
            return model

        def broken():
            raise RuntimeError("no data here")

        def number():
            return 7
        """)
    )
    code, out, _ = call("estimate", "my_training:build_model", "--batch-size", "64,128", "--engine", "trace", "--json")
    small, large = json.loads(out)
    assert code == 0
    assert (small["batch_size"], large["batch_size"]) == (64, 128)
    assert small["expected"] < large["expected"]
    for name, message in {
        "broken": "no data here",
        "number": "keras.Model",
        "missing": "has no function 'missing'",
    }.items():
        code, _, err = call("estimate", f"my_training:{name}", "--batch-size", "4")
        assert code == 2
        assert message in err


def test_a_model_of_keras_applications(call):
    arguments = ("--input-shape", "32,32,3", "--classes", "10", "--engine", "trace")
    code, out, _ = call("estimate", "keras.applications.MobileNetV2", "--batch-size", "8", *arguments)
    assert code == 0
    assert "assumed" in out


def test_bad_input_on_the_command_line(call, tmp_path):
    (tmp_path / "broken.keras").write_bytes(b"not a zip")
    (tmp_path / "notes.txt").write_text("hello")
    lambda_model = keras.Sequential([keras.Input((4,)), layers.Lambda(lambda x: x * 2)])
    lambda_model.save(tmp_path / "code.keras")
    conv_net().save(tmp_path / "model.keras")
    for arguments, message in [
        (("broken.keras",), "is not a Keras model"),
        (("notes.txt",), "could not be loaded"),
        (("nowhere.keras",), "There is no file"),
        (("code.keras",), "holds Python code"),
        (("something",), "Expected a Keras file"),
        (("nomodule:build",), "no module 'nomodule'"),
        (("keras.applications.Resnet5",), "has no 'Resnet5'"),
        (("model.keras", "--gpu", "rtx-4009"), "Near matches: rtx-4090"),
        (("model.keras", "--input-shape", "3"), "does not agree"),
        (("model.keras", "--input-shape", "a,b"), "Expected a shape"),
        (("model.keras", "--precision", "float7"), "dtype policy"),
        (("model.keras", "--backend", "numpy"), "Expected a backend"),
        (("model.keras", "--memory", "much"), "memory='much'"),
        (("model.keras", "--optimizer", "sgd"), "compiled, with Adam"),
        (("model.keras", "--classes", "10"), "--classes only for"),
        ((".",), "which is a folder"),
        (("my_training:",), "module:function"),
    ]:
        code, _, err = call("estimate", *arguments, "--batch-size", "4")
        assert (code, message in " ".join(err.split())) == (2, True), (arguments, err)
    for size in ("0", "-3", "many", "4,0"):
        code, _, err = call("estimate", "model.keras", f"--batch-size={size}")
        assert code == 2
        assert "at least 1" in err


def test_the_largest_batch_on_the_command_line(call, tmp_path):
    wide_net("sgd").save(tmp_path / "model.keras")
    code, out, _ = call("max-batch-size", "model.keras", "--memory", "3GiB", "--engine", "trace")
    assert code == 0
    assert int(out) > 1000


def test_records_are_frozen(found):
    with pytest.raises(dataclasses.FrozenInstanceError):
        found.low = 0
