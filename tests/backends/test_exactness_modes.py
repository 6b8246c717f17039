"""Graph, eager and compiled steps (here.py says what that is on each backend); whole batches, bit for bit."""

import keras
import numpy as np
import pytest
from here import SLOW_COMPILES, USUAL, crossed, modes, only, representative
from keras import layers, ops, optimizers
from models import (
    CLASSES,
    STEPS,
    WORDS,
    check_exact,
    check_same,
    classes,
    classifier,
    compiled,
    numbers,
    regressor,
    tagger,
    tags,
    train,
    words,
)

pytestmark = pytest.mark.usefixtures("float64")


def embedded():
    inner = [layers.Embedding(WORDS, 4, mask_zero=True), layers.Flatten(), layers.Dense(CLASSES, "softmax")]
    return compiled(
        keras.Sequential([layers.Input((STEPS,), dtype="int32"), *inner]), optimizer=optimizers.Adam(0.05, clipnorm=0.1)
    )


def scalar(y_true, y_pred):
    return ops.mean(ops.square(y_true - y_pred)) + ops.max(y_pred)


CASES = {
    "masked": (lambda: tagger(metrics=["accuracy"]), lambda: (words(), tags())),
    "sparse": (embedded, lambda: (words(), classes())),
    "gathered": (lambda: regressor(loss=scalar, metrics=["mae"]), lambda: (numbers(), numbers(width=2, seed=1))),
    "regularised": (
        lambda: classifier(
            layers.Dense(4, kernel_regularizer="l2", activity_regularizer="l1"), optimizer=optimizers.AdamW(0.05)
        ),
        lambda: (numbers(), classes()),
    ),
}


def in_modes():
    """Every case in every mode but the usual one; where a compile takes half a minute, one for each kind of step."""
    slow = {"sparse", "regularised"} if SLOW_COMPILES else set()
    for mode in dict.fromkeys(["eager", *modes("xla", "uncompiled")]):
        if mode != USUAL:
            yield from ((case, mode) for case in CASES if mode != "xla" or case not in slow)


def in_modes_marked():
    """All of them in one of the modes, and two in each of the others; more is exhaustive."""
    (_, first), *_ = in_modes()
    for case, mode in in_modes():
        more = mode != first and case in ("masked", "regularised")
        yield pytest.param(case, mode, marks=[pytest.mark.exhaustive] if more else [])


@pytest.mark.parametrize(("case", "mode"), in_modes_marked())
def test_modes(case, mode):
    build, data = CASES[case]
    check_exact(build, *data(), mode=mode, micro=4, tolerance=1e-8)


@pytest.mark.parametrize(("case", "mode"), crossed(CASES, modes("graph", "eager")))
def test_whole_batches_are_bitwise_the_same(case, mode):
    build, data = CASES[case]
    expected, received = (train(build, *data(), mode=mode, guard=guard) for guard in (None, {}))
    check_same(expected, received, tolerance=0.0)


WHOLE = {
    "Adafactor": lambda: optimizers.Adafactor(0.05),
    "Ftrl": lambda: optimizers.Ftrl(0.05),
    "Lion with EMA": lambda: optimizers.Lion(0.05, use_ema=True, ema_overwrite_frequency=2),
    "accumulating": lambda: optimizers.RMSprop(0.05, gradient_accumulation_steps=2),
}


@pytest.mark.parametrize("optimizer", representative(WHOLE, "Lion with EMA", "accumulating"))
def test_whole_batches_are_bitwise_the_same_for_every_kind_of_optimizer(optimizer):
    expected, received = (
        train(lambda: classifier(optimizer=WHOLE[optimizer]()), numbers(), classes(), guard=guard)
        for guard in (None, {})
    )
    check_same(expected, received, tolerance=0.0)


def two_outputs(loss="mse"):
    x = layers.Input((4,))
    hidden = layers.Dense(4, "tanh")(x)
    model = keras.Model(x, {"a": layers.Dense(2, name="a")(hidden), "b": layers.Dense(1, name="b")(hidden)})
    return compiled(model, {"a": loss, "b": "mae"}, loss_weights={"a": 0.5, "b": 2.0})


COMPILED = "graph" if SLOW_COMPILES else "xla"
HISTORIES = dict.fromkeys(
    (*modes(mode), loss) for mode, loss in [("graph", "mse"), ("eager", "mse"), (COMPILED, "mse"), (COMPILED, scalar)]
)


@pytest.mark.parametrize(("mode", "loss"), HISTORIES)
def test_history_of_several_outputs(mode, loss):
    """Keras weights these by the batch size where that is known while tracing, so each mode is its own reference."""
    targets = {"a": numbers(width=2, seed=1), "b": numbers(width=1, seed=2)}
    check_exact(lambda: two_outputs(loss), numbers(), targets, mode=mode, plain_mode=mode, micro=4)


@pytest.mark.parametrize("micro", representative([1, 2, 5, 11, 12], 1, 5, 12))
def test_every_piece_size(micro):
    """One sample at a time, sizes that do not divide the batch, and a short batch smaller than a piece."""
    check_exact(tagger, words(), tags(), micro=micro)


def test_short_batch_of_one_sample():
    check_exact(classifier, numbers(13), classes(13), micro=2)


def test_repeated_epochs_reuse_programs():
    expected, received = check_exact(classifier, numbers(), classes(), epochs=3)
    assert received["iteration"] == 9
    assert np.isfinite(expected.history["loss"]).all()


@only("tensorflow", because="a compiler that takes over the variables a program writes")
def test_what_xla_compiles_writes_to_no_variable():
    """On a GPU XLA frees what it took over when it runs out of memory, though the variables still have it."""
    model = train(embedded, words(), classes(), guard={"micro_batch_size": 4}, mode="xla").model
    programs = [concrete for _, concrete in model._oomproof_guard._driver.step._traced.values()]
    programs += [
        concrete
        for program in model._oomproof_guard._driver.step._programs.values()
        for concrete in program._list_all_concrete_functions()
    ]
    compiled_functions = 0
    for program in programs:
        definition = program.graph.as_graph_def()
        assert any("Assign" in node.op or "Scatter" in node.op for node in definition.node)
        for function in definition.library.function:
            if function.attr["_XlaMustCompile"].b:
                compiled_functions += 1
                written = [node.op for node in function.node_def if "Assign" in node.op or "ResourceScatter" in node.op]
                assert written == []
    assert compiled_functions
