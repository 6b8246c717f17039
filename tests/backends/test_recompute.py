"""Segments computed again in the backward pass: the same training as plain Keras's, in less memory."""

import json
import pickle

import keras
import numpy as np
import oom_memory
import pytest
from here import BACKEND, SLOW_COMPILES, USUAL, crossed, modes, only
from keras import layers
from recompute_models import (
    CASES,
    CLASSES,
    IMAGES,
    NUMBERS,
    agreed,
    check_same,
    compiled,
    every,
    made,
    nested,
    one,
    residual,
    shared,
    subclassed,
    take_over,
    trained,
    transformer,
    variables,
    with_gap,
)

from oomproof import _backends as backends

SEGMENTATIONS = [every, one, with_gap]
_plain = {}


def plain(build, mode="eager"):
    """Plain training, once for all ways to cut a model. XLA on TensorFlow draws other random numbers."""
    usual = USUAL if BACKEND == "jax" else "eager"  # Where it is the quicker of the two.
    key = (build, mode if mode == "xla" and BACKEND == "tensorflow" else usual)
    if key not in _plain:
        _plain[key] = agreed(lambda: trained(build, CASES.get(build, (NUMBERS, CLASSES)), key[1]))
    return _plain[key]


@pytest.mark.parametrize(("build", "segments"), crossed(CASES, SEGMENTATIONS))
def test_the_same_training(float64, build, segments):
    check_same(plain(build), trained(build, CASES[build], USUAL, segments))


OTHER_MODES = [mode for mode in modes("graph", "eager", "xla") if mode != USUAL]


@pytest.mark.parametrize(
    ("build", "mode"),
    # Where each compile takes its time, one of them shows it.
    [
        (build, mode)
        for build in (residual, transformer)
        for mode in OTHER_MODES
        if build is residual or not (SLOW_COMPILES and mode == "xla")
    ],
)
def test_the_same_training_in_other_modes(float64, build, mode):
    check_same(plain(build, mode), trained(build, CASES[build], mode, with_gap))


@pytest.mark.parametrize(
    "segments",
    [
        ("norm..drop", "dense#2..drop#2"),  # Each call in a segment of its own.
        ("norm..add",),  # Several calls in one.
        ("drop..norm#2",),  # Written before, inside and after.
    ],
)
def test_shared_layers_across_segments(float64, segments):
    check_same(plain(shared), trained(shared, CASES[shared], USUAL, lambda model: segments))


@pytest.mark.parametrize(
    "segments",
    [
        ("block_0", "block_1"),
        ("block_1/norm", "block_0/penalty", "head"),
        ("middle/one..middle/two", "block_0"),
        ("block_0", "block_0/drop", "middle"),  # What is inside of another is computed again with that.
    ],
)
def test_layers_of_own_code(float64, segments):
    received = trained(subclassed, CASES.get(subclassed, (NUMBERS, CLASSES)), USUAL, lambda model: segments)
    check_same(plain(subclassed), received)


@pytest.mark.parametrize(
    ("build", "mode"),
    crossed([residual, transformer], modes(*([USUAL] if SLOW_COMPILES else ["eager", "graph", "xla"]))),
)
def test_together_with_pieces(float64, build, mode):
    """Against pieces without recomputation: batch statistics of pieces are not those of the batch."""
    expected = trained(build, CASES[build], mode, lambda model: (), pieces=2)
    check_same(expected, trained(build, CASES[build], mode, with_gap, pieces=2), 1e-10)


def test_gathered_losses_and_pieces(float64):
    def build():
        model = transformer()
        return compiled(model, lambda y, p: keras.ops.mean(keras.losses.sparse_categorical_crossentropy(y, p)) ** 2)

    data = CASES[transformer]
    expected = trained(build, data, USUAL, lambda model: (), pieces=2)
    check_same(expected, trained(build, data, USUAL, with_gap, pieces=2), 1e-10)


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
def test_mixed_precision(policy):
    def build():
        keras.config.set_dtype_policy(policy)
        try:
            return shared()
        finally:
            keras.config.set_dtype_policy("float32")

    expected = trained(build, CASES[shared], USUAL, lambda model: ())
    check_same(expected, trained(build, CASES[shared], USUAL, every), 2e-2)


def test_changed_between_steps(float64):
    model = made(residual, USUAL)
    step = take_over(model, ())
    for segments in ((), with_gap(model), one(model)):
        step.recompute = segments
        model.train_on_batch(IMAGES[:4], CLASSES[:4])
    same = made(residual, "eager")
    for _ in range(3):
        same.train_on_batch(IMAGES[:4], CLASSES[:4])
    check_same((None, variables(same), {}), (None, variables(model), {}))


@only("tensorflow", because="sparse gradients")
def test_tables_keep_their_sparse_gradients():
    import tensorflow as tf

    model = made(transformer, "eager")
    with backends.current().recomputing(model, one(model)), tf.GradientTape() as tape:
        total = tf.reduce_sum(model(CASES[transformer][0][:4], training=True))
    table = model.get_layer("words").embeddings
    (found,) = tape.gradient(total, [table.value])
    assert isinstance(found, tf.IndexedSlices)
    assert found.values.shape == (20, 4)


def test_plain_steps_of_keras(float64):
    """As the estimator runs them: with no scope of ours."""
    same = made(residual, "eager")
    same.train_on_batch(IMAGES[:4], CLASSES[:4])
    model = made(residual, "eager")
    with backends.current().recomputing(model, with_gap(model)):
        model.train_on_batch(IMAGES[:4], CLASSES[:4])
    check_same((None, variables(same), {}), (None, variables(model), {}))


def test_nothing_stays(float64, tmp_path):
    model, same = made(residual, USUAL), made(residual, USUAL)
    before = [{name: id(value) for name, value in vars(layer).items()} for layer in model._flatten_layers()]
    with backends.current().recomputing(model, every(model)):
        assert "_run_through_graph" in vars(model)
    with pytest.raises(RuntimeError, match="on purpose"), backends.current().recomputing(model, every(model)):
        raise RuntimeError("on purpose")
    after = [{name: id(value) for name, value in vars(layer).items()} for layer in model._flatten_layers()]
    assert before == after
    take_over(model, every(model))
    model.fit(IMAGES, CLASSES, batch_size=4, verbose=0)
    backends.current().uninstall(model)
    assert "_run_through_graph" not in vars(model)
    same.fit(IMAGES, CLASSES, batch_size=4, verbose=0)
    model.summary(print_fn=lambda text: None)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    copy = pickle.loads(pickle.dumps(model))
    for other in (loaded, copy):
        np.testing.assert_allclose(other.predict(IMAGES, verbose=0), model.predict(IMAGES, verbose=0))


def test_nothing_stays_after_a_failed_step():
    class Fails(keras.layers.Layer):
        def call(self, x):
            raise RuntimeError("on purpose")

        def compute_output_shape(self, shape):
            return shape

    def build():
        inputs = keras.Input((4,))
        x = layers.Dense(3, name="dense")(inputs)
        return compiled(keras.Model(inputs, Fails(name="fails", dtype="float32")(x)), "mse")

    with keras.StatelessScope():
        model = made(build, "eager")
    step = backends.current().step(model)
    step.recompute = ("dense..fails",)
    with pytest.raises(RuntimeError, match="on purpose"):
        step.train(backends.current().as_batch(NUMBERS[:4], NUMBERS[:4, :3], None), 1, False)
    assert "_run_through_graph" not in vars(model)
    assert not keras.src.backend.common.global_state.get_global_attribute("oomproof_inside_segment", False)


def test_evaluation_and_prediction_stay(float64):
    model, same = made(residual, USUAL), made(residual, "eager")
    take_over(model, every(model))
    for method, data in (("evaluate", (IMAGES, CLASSES)), ("predict", (IMAGES,))):
        expected, received = (getattr(each, method)(*data, batch_size=4, verbose=0) for each in (same, model))
        np.testing.assert_allclose(expected, received, atol=1e-12)


@pytest.mark.parametrize(
    ("segments", "says"),
    [
        (("conv_9",), "Received: 'conv_9'. Did you mean conv_"),
        (("stem..conv_9",), "Received: 'conv_9'.* in 'stem..conv_9'"),
        (("relu_1..relu_0",), "to a later one .* Received: 'relu_1..relu_0'"),
        (("stem..relu_0", "relu_0..conv_0"), "do not overlap. Received: 'relu_0..conv_0' beside 'stem..relu_0'"),
        (("stem", "stem"), "do not overlap"),
    ],
)
def test_bad_labels(segments, says):
    model = made(residual, "eager")
    with pytest.raises(ValueError, match=says):
        backends.current().step(model).recompute = segments


def test_bad_labels_of_own_code():
    model = made(subclassed, "eager")
    model(NUMBERS[:2])
    with pytest.raises(ValueError, match="may be block_0/dense, block_1/dense"):
        backends.current().step(model).recompute = ("dense",)
    assert backends.current().segments(model) == ()


def test_labels_of_nested_models():
    found = backends.current().segments(made(nested, "eager"))
    assert found == (
        "backbone/inner/a",
        "backbone/inner/b",
        "backbone/norm",
        "backbone/twin",
        "backbone/twin#2",
        "head",
    )


# Memory


@pytest.mark.parametrize("mode", ["graph"] if BACKEND != "tensorflow" else ["graph", "xla", "eager"])
def test_memory_falls(forks, mode):
    environment = oom_memory.environment(BACKEND, 2000)
    kept, recomputed = json.loads(forks.run("recompute_child", mode, environment=environment).splitlines()[-1])
    assert kept >= 1.8 * recomputed, (kept, recomputed)
