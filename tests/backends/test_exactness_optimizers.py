"""Optimizers: what happens once a batch happens once a batch, and sparse gradients stay as they are."""

import keras
import numpy as np
import pytest
from here import modes, only, representative
from keras import layers, optimizers
from models import CLASSES, STEPS, WORDS, check_exact, classes, classifier, compiled, numbers, train, words

pytestmark = pytest.mark.usefixtures("float64")

BUILT_IN = {
    "SGD": {},
    "SGD momentum": {"momentum": 0.9},
    "SGD nesterov": {"momentum": 0.9, "nesterov": True},
    "RMSprop": {},
    "RMSprop centered": {"centered": True, "momentum": 0.5},
    "Adam": {},
    "Adam amsgrad": {"amsgrad": True},
    "AdamW": {"weight_decay": 0.1},
    "Adamax": {},
    "Nadam": {},
    "Adagrad": {},
    "Adadelta": {},
    "Adafactor": {},
    "Ftrl": {"l1_regularization_strength": 0.01, "l2_regularization_strength": 0.01},
    "Lion": {},
    "Lamb": {},
    "Muon": {},
    "ScheduleFreeAdamW": {},
}


def embedded(optimizer, mask_zero=False):
    """Words that repeat within a batch, so that merging the rows of their gradient would show."""
    inner = [layers.Embedding(WORDS, 4, mask_zero=mask_zero), layers.Flatten(), layers.Dense(CLASSES, "softmax")]
    return compiled(keras.Sequential([layers.Input((STEPS,), dtype="int32"), *inner]), optimizer=optimizer)


# Those that keep state of a kind of their own, or have steps of their own.
ESSENTIAL = ("SGD momentum", "Adam", "Nadam", "Adafactor", "Muon", "ScheduleFreeAdamW")


@pytest.mark.parametrize("name", representative(BUILT_IN, *ESSENTIAL))
def test_every_optimizer_with_dense_and_sparse_gradients(name):
    kind = getattr(optimizers, name.split()[0], None)
    if kind is None:
        pytest.skip(f"this Keras has no {name}")
    # Rounding of one part in 1e16 is divided by the root of squared gradients: only that much looser.
    check_exact(lambda: embedded(kind(0.05, **BUILT_IN[name])), words(), classes(), mode="graph", tolerance=1e-7)


OPTIONS = {
    "clipvalue": {"clipvalue": 0.01},
    "clipnorm": {"clipnorm": 0.05},
    "global_clipnorm": {"global_clipnorm": 0.05},
    "weight decay": {"weight_decay": 0.1},
    "EMA": {"use_ema": True, "ema_momentum": 0.5},
    "EMA overwriting": {"use_ema": True, "ema_momentum": 0.5, "ema_overwrite_frequency": 2},
    "own accumulation": {"gradient_accumulation_steps": 2},
    "own accumulation and clipping": {"gradient_accumulation_steps": 2, "clipnorm": 0.05, "weight_decay": 0.1},
    "loss scale": {"loss_scale_factor": 128.0},
}


def test_average_overwrites_weights_in_a_graph_too():
    options = {"use_ema": True, "ema_momentum": 0.5, "ema_overwrite_frequency": 2}
    check_exact(lambda: classifier(optimizer=optimizers.SGD(0.5, **options)), numbers(), classes(), mode="graph")


def cases():
    """Every option with a gradient that is dense, and with one that is sparse where the backend has those."""
    for number, (name, options) in enumerate(OPTIONS.items()):
        # In `make test` each with one of the two.
        dense, sparse = ([pytest.mark.exhaustive] if number % 2 == odd else [] for odd in (1, 0))
        yield pytest.param(options, False, id=f"dense-{name}", marks=dense)
        scaled = only("jax", "torch", because="a loss scale for sparse gradients")
        yield pytest.param(options, True, id=f"sparse-{name}", marks=[*sparse, *[scaled] * (name == "loss scale")])


@pytest.mark.parametrize(("options", "sparse"), cases())
def test_options(options, sparse):
    def build():
        optimizer = optimizers.SGD(0.5, momentum=0.9, **options)
        return embedded(optimizer) if sparse else classifier(optimizer=optimizer)

    check_exact(build, words() if sparse else numbers(), classes(), mode="graph" if sparse else "eager")


def test_schedule_counts_batches():
    schedule = optimizers.schedules.PiecewiseConstantDecay([1, 2], [1.0, 0.1, 0.01])
    expected, received = check_exact(
        lambda: classifier(optimizer=optimizers.Adam(schedule)), numbers(), classes(), tolerance=1e-7
    )
    assert received["iteration"] == expected["iteration"] == 3


def test_learning_rate_set_by_callback():
    check_exact(
        classifier,
        numbers(),
        classes(),
        epochs=2,
        callbacks=[keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate / (epoch + 1))],
    )


def test_constraints():
    constrained = {"kernel_constraint": keras.constraints.MaxNorm(0.3), "bias_constraint": "non_neg"}
    check_exact(lambda: classifier(layers.Dense(4, **constrained)), numbers(), classes())


def test_several_optimizers():
    if not hasattr(optimizers, "MultiOptimizer"):
        pytest.skip("this Keras has no MultiOptimizer")

    def build():
        kinds = [optimizers.SGD(0.1, momentum=0.9), optimizers.Adam(0.1)]
        return classifier(optimizer=optimizers.MultiOptimizer(lambda v: kinds["kernel" in v.path]))

    check_exact(build, numbers(), classes(), tolerance=1e-7)


def test_own_optimizer():
    class SignedDescent(optimizers.Optimizer):
        def update_step(self, gradient, variable, learning_rate):
            self.assign_sub(variable, learning_rate * keras.ops.sign(gradient))

    check_exact(lambda: classifier(optimizer=SignedDescent(0.01)), numbers(), classes())


# Mixed precision


def half(inner=None, **options):
    """float16 inside; targets of one batch can be made to overflow."""
    model = keras.Sequential(
        [layers.Input((4,)), layers.Dense(5, "tanh", dtype="mixed_float16"), layers.Dense(1, dtype="mixed_float16")]
    )
    scaled = optimizers.LossScaleOptimizer(inner or optimizers.SGD(0.05), initial_scale=8.0, **options)
    return compiled(model, "mse", optimizer=scaled)


@pytest.mark.parametrize("mode", modes("graph", "eager"))
def test_mixed_precision(mode):
    check_exact(
        lambda: half(optimizers.Adam(0.05), dynamic_growth_steps=2),
        numbers(),
        numbers(width=1, seed=1),
        mode=mode,
        tolerance=1e-2,
    )


@pytest.mark.parametrize("mode", modes("graph", "eager"))
def test_one_bad_sample_skips_the_whole_step(mode):
    targets = numbers(width=1, seed=1)
    targets[14] = np.inf
    build, data = half, (numbers(), targets)
    expected, received = check_exact(build, *data, mode=mode, tolerance=1e-2)
    assert expected["dynamic_scale"] == received["dynamic_scale"] == 4.0
    assert received["iteration"] == 2
    skipped = train(build, *(np.concatenate([a[:12], a[24:]]) for a in data), guard={"micro_batch_size": 3}, mode=mode)
    for name, value in received.variables.items():
        if "kernel" in name or "bias" in name:
            np.testing.assert_allclose(value, skipped.variables[name], atol=1e-2)


def test_half_precision_is_summed_in_single():
    """Many small pieces: their sum must not lose what a half-precision number cannot hold."""
    check_exact(half, numbers(), numbers(width=1, seed=1), micro=1, tolerance=5e-3)
