"""`estimate` on each backend: what the figures mean, and that they follow what is run."""

import concurrent.futures
import dataclasses
import json

import keras
import numpy as np
import pytest
from estimated import FIELDS, MIB, conv_net, weights_of, wide_net
from here import BACKEND
from keras import layers

import oomproof
from oomproof import _simulators as simulators
from oomproof._estimation.bands import band_of
from oomproof._machine import gpus
from oomproof._records.trace import Compiled


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


@pytest.mark.parametrize("name", ["nadam", "adafactor", "muon"])
def test_optimizers_that_give_variables_their_values_or_read_them(name):
    """Nadam's product and Adafactor's slots are made with a value, and on torch Nadam reads its product on the host."""
    model = wide_net(name)
    assert oomproof.estimate(model, 4, engine="trace").expected > weights_of(wide_net("sgd"))
    assert not model.optimizer.built


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


def test_convolutions_are_spoken_of_where_there_are_some(found):
    said = [any("convolutions" in note for note in each.notes) for each in (found, estimate_of_wide_net())]
    assert said == [BACKEND != "torch", False]


def test_the_first_step_of_convolutions_has_a_peak_of_its_own():
    """In graph mode, where kernels are looked for when a shape is first run."""
    for model, convolves in ((conv_net(), True), (wide_net("sgd"), False)):
        found = oomproof.estimate(model, 4, gpu="h200", engine="trace", jit=False if BACKEND == "tensorflow" else None)
        assert any("the first" in note for note in found.notes) == (convolves and BACKEND == "tensorflow")


def estimate_of_wide_net():
    return oomproof.estimate(wide_net("sgd"), 8, engine="trace")


def test_several_threads_at_a_time():
    model = conv_net()
    alone = oomproof.estimate(model, 8, engine="trace").expected
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        together = list(pool.map(lambda _: oomproof.estimate(model, 8, engine="trace").expected, range(3)))
    assert together == [alone] * 3


def test_records_are_frozen(found):
    with pytest.raises(dataclasses.FrozenInstanceError):
        found.low = 0
