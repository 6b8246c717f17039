"""A model that is changed and not compiled again trains under guard as it does under plain Keras.

What that is differs between backends, and is written down in common/fingerprint.py. Here each script runs plain and
guarded, and what comes out is compared: weights, losses, or the error.
"""

import keras
import numpy as np
import pytest
from here import modes, only
from keras import layers
from models import force_pieces, made, snapshot

import oomproof
from oomproof._backends import current
from oomproof._backends.common.fingerprint import Fingerprint
from oomproof._estimation.workloads import describe
from oomproof._planning import plan_cache
from oomproof._records.trace import Target

pytestmark = pytest.mark.usefixtures("float64")

RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(12, 4)), RNG.normal(size=(12, 4))


def network(optimizer=None):
    """Layers of one shape, so that values in the wrong place are not found by their shapes."""
    inner = keras.Sequential([layers.Dense(4, "tanh"), layers.Dense(4, "tanh")], name="inner")
    model = keras.Sequential([layers.Input((4,)), layers.Dense(4, "tanh"), inner, layers.Dense(4)])
    model.compile(optimizer or keras.optimizers.SGD(0.1, momentum=0.5), "mse")
    return model


def with_statistics():
    """A layer that behaves otherwise when it is frozen, and has no weight that would show it."""
    normal = layers.BatchNormalization(center=False, scale=False)
    model = keras.Sequential([layers.Input((4,)), layers.Dense(4), normal, layers.Dense(4)])
    model.compile(keras.optimizers.SGD(0.1), "mse")
    return model


def fit(model, **more):
    return model.fit(X, Y, batch_size=4, shuffle=False, verbose=0, **more).history["loss"]


class Freezes(keras.callbacks.Callback):
    """Freezes a layer once, at the end of the first epoch or in the middle of it."""

    def __init__(self, batch=None, force=False):
        super().__init__()
        self.batch, self.force = batch, force

    def on_train_batch_end(self, batch, logs=None):
        if batch == self.batch:
            # On JAX Keras would put values into the wrong variables later.
            getattr(self.model, "jax_state_sync", lambda: None)()
            self.freeze()

    def on_epoch_end(self, epoch, logs=None):
        if self.batch is None and epoch == 0:
            self.freeze()

    def freeze(self):
        self.model.layers[0].trainable = False
        if self.force:
            self.model.make_train_function(force=True)


def frozen_between_fits(model):
    first = fit(model)
    model.layers[0].trainable = False
    return first, fit(model)


def frozen_inside_between_fits(model):
    first = fit(model)
    model.layers[1].layers[0].trainable = False
    return first, fit(model)


def frozen_and_made_anew(model):
    first = fit(model)
    model.layers[0].trainable = False
    model.make_train_function(force=True)
    return first, fit(model)


def frozen_at_an_epochs_end(model):
    return fit(model, epochs=2, callbacks=[Freezes()])


def frozen_and_made_anew_at_an_epochs_end(model):
    return fit(model, epochs=2, callbacks=[Freezes(force=True)])


def frozen_in_an_epoch(model):
    return fit(model, epochs=2, callbacks=[Freezes(batch=1)])


def frozen_and_made_anew_in_an_epoch(model):
    return fit(model, epochs=2, callbacks=[Freezes(batch=1, force=True)])


def frozen_before_other_data(model):
    model.train_on_batch(X[:4], Y[:4])
    model.layers[0].trainable = False
    return model.train_on_batch(X[:4], Y[:4]), model.train_on_batch(X[:6], Y[:6])


def frozen_between_evaluations(model):
    first = model.evaluate(X, Y, verbose=0)
    model.layers[0].trainable = False
    return first, model.evaluate(X, Y, verbose=0), model.test_on_batch(X, Y), model.predict(X, verbose=0)


def frozen_compiled_and_thawed(model):
    """Back to what it was: what was kept for that is for it alone."""
    found = [fit(model)]
    for trainable in (False, True, False):
        model.layers[0].trainable = trainable
        model.compile(keras.optimizers.SGD(0.1), "mse")
        found.append(fit(model))
    return found


def another_optimizer(model):
    first = fit(model)
    model.optimizer = keras.optimizers.SGD(0.3, momentum=0.5)
    model.optimizer.build(model.trainable_variables)
    return first, fit(model)


def another_kind_of_optimizer(model):
    first = fit(model)
    model.optimizer = keras.optimizers.Adam(0.1)
    model.optimizer.build(model.trainable_variables)
    return first, fit(model)


def another_policy(model):
    first = fit(model)
    model.layers[0].dtype_policy = keras.dtype_policies.DTypePolicy("float32")
    return first, fit(model)


def another_layer(model):
    first = fit(model)
    model.add(layers.Dense(4, kernel_initializer="ones"))
    return first, fit(model)


def another_loss(model):
    first = fit(model)
    model.compile(keras.optimizers.SGD(0.1), "mae")
    return first, fit(model)


def the_function_taken_away(model):
    first = fit(model)
    model.layers[0].trainable = False
    model.train_function = None
    return first, fit(model)


SCRIPTS = [
    frozen_between_fits,
    frozen_inside_between_fits,
    frozen_and_made_anew,
    frozen_at_an_epochs_end,
    frozen_and_made_anew_at_an_epochs_end,
    frozen_in_an_epoch,
    frozen_and_made_anew_in_an_epoch,
    frozen_before_other_data,
    frozen_between_evaluations,
    frozen_compiled_and_thawed,
    another_optimizer,
    another_kind_of_optimizer,
    another_policy,
    another_layer,
    another_loss,
    the_function_taken_away,
]


def outcome(script, model):
    """What a script returns and leaves behind, or the error it ends in."""
    try:
        found = script(model)
    except ValueError as error:
        return str(error).split(":")[0], None
    return keras.tree.flatten(found), snapshot(model)


def check_same_outcome(plain, guarded):
    (expected, variables), (received, ours) = plain, guarded
    if variables is None or ours is None:
        assert received == expected
        return
    for one, other in zip(expected, received, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-9)
    for name, value in variables.items():
        np.testing.assert_allclose(value, ours[name], rtol=0, atol=1e-9, err_msg=name)


def check_as_plain(script, build=network, mode="graph", **guard):
    plain = outcome(script, made(build, mode))
    check_same_outcome(plain, outcome(script, oomproof.guard(made(build, mode), **guard)))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)
def test_changed_models_train_as_under_plain_keras(script):
    check_as_plain(script)


IN_PIECES = [frozen_between_fits, frozen_and_made_anew_in_an_epoch, another_kind_of_optimizer]


@pytest.mark.parametrize("script", IN_PIECES, ids=lambda script: script.__name__)
def test_changed_models_train_in_pieces_as_under_plain_keras(script):
    check_as_plain(script, micro_batch_size=3)


@pytest.mark.parametrize("mode", modes("eager"))
def test_changed_models_train_op_by_op_as_under_plain_keras(mode):
    for script in (frozen_between_fits, frozen_at_an_epochs_end, another_optimizer):
        check_as_plain(script, mode=mode)


def test_a_frozen_layer_that_no_weight_shows():
    def script(model):
        first = fit(model)
        model.layers[1].trainable = False
        return first, fit(model)

    check_as_plain(script, build=with_statistics)


def test_batches_that_are_cut_for_the_first_time_after_a_layer_was_frozen():
    """Where Keras goes on with its trace, what is traced now is traced for the model as it was then."""

    def script(model, pieces=None):
        first = fit(model)
        model.layers[0].trainable = False
        model.optimizer = keras.optimizers.SGD(0.3)
        model.optimizer.build(model.trainable_variables)
        if pieces:
            force_pieces(model, pieces)
        second = fit(model)
        # And the model itself is as the user left it.
        assert not model.layers[0].trainable
        assert not any(variable.trainable for variable in model.layers[0].variables)
        assert model.optimizer.momentum == 0
        return first, second

    plain = outcome(script, made(network))
    check_same_outcome(plain, outcome(lambda model: script(model, 3), oomproof.guard(made(network))))


@only("jax", because="layers that change places in the lists of values")
def test_values_stay_with_their_variables_when_layers_change_places():
    """Plain Keras computes with the values of one layer in the place of the other. Under guard it is a new program."""

    def swapped(model, anew):
        model.layers[0].trainable = False
        fit(model)
        model.layers[0].trainable, model.layers[2].trainable = True, False
        if anew:
            model.make_train_function(force=True)
        return fit(model)

    plain = outcome(lambda model: swapped(model, True), made(network))
    check_same_outcome(plain, outcome(lambda model: swapped(model, False), oomproof.guard(made(network))))


# The guard stays where it is


@pytest.mark.parametrize("phase", ["train", "test", "predict"])
def test_our_function_stays_when_keras_makes_its_own_anew(phase):
    model = oomproof.guard(made(network))
    calls = {
        "train": lambda: model.train_on_batch(X, Y),
        "test": lambda: model.test_on_batch(X, Y),
        "predict": lambda: model.predict_on_batch(X),
    }
    for _ in range(2):
        calls[phase]()
        ours = getattr(model, f"{phase}_function")
        getattr(model, f"make_{phase}_function")(force=True)
        assert type(getattr(model, f"{phase}_function")) is type(ours)


def test_every_batch_is_guarded_after_the_function_was_made_anew_in_an_epoch():
    class MakesAnew(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 0:
                self.model.make_train_function(force=True)

    model = oomproof.guard(made(network))
    history = model.fit(X, Y, batch_size=4, epochs=2, verbose=0, callbacks=[MakesAnew()])
    assert history.run.steps["train"] == 6


def test_unguarded_models_have_keras_own_makers():
    model = oomproof.unguard(oomproof.guard(made(network)))
    assert not any(name.startswith("make_") for name in vars(model))


# What is kept


def test_a_model_that_does_not_change_keeps_its_driver():
    model = oomproof.guard(made(network))
    fit(model)
    driver = model._oomproof_guard._driver
    model.evaluate(X, Y, verbose=0)
    model.predict(X, verbose=0)
    fit(model, validation_data=(X, Y))
    model.train_on_batch(X, Y)
    assert model._oomproof_guard._driver is driver
    assert len(model._oomproof_guard._drivers._made) == 1


def test_a_changed_model_has_sizes_of_its_own_and_finds_the_old_ones_again():
    model = oomproof.guard(made(network))
    model.predict(X, verbose=0)
    drivers = []
    for trainable in (False, True, False):
        model.layers[0].trainable = trainable
        model.make_predict_function(force=True)
        model.predict(X, verbose=0)
        drivers.append(model._oomproof_guard._driver)
    assert drivers[0] is drivers[2] is not drivers[1]
    assert drivers[0].training.measured["predict"] is not drivers[1].training.measured["predict"]


def test_what_was_for_another_optimizer_is_let_go_of():
    """Its programs would hold its slots. Where Keras's own traces go on with them, nothing can be let go of."""
    model = oomproof.guard(made(network))
    fit(model)
    model.optimizer = keras.optimizers.SGD(0.1, momentum=0.5)
    model.optimizer.build(model.trainable_variables)
    model.make_train_function(force=True)
    fit(model)
    guard = model._oomproof_guard
    assert len(guard._drivers._made) == (2 if guard._driver.step.traces_hold_variables else 1)


# What it sees


def _replace_layer(model):
    model._layers[-1] = layers.Activation("tanh")


CHANGES = {
    "a layer frozen": lambda model: setattr(model.layers[0], "trainable", False),
    "a layer inside frozen": lambda model: setattr(model.layers[1].layers[0], "trainable", False),
    "one weight frozen": lambda model: setattr(model.layers[0].kernel, "trainable", False),
    "a layer without weights frozen": lambda model: setattr(model.layers[3], "_trainable", False),
    "a policy": lambda model: setattr(model.layers[0], "dtype_policy", "mixed_bfloat16"),
    "a layer added": lambda model: model.add(layers.Dropout(0.5)),
    "a weight added": lambda model: model.layers[0].enable_lora(2),
    "the optimizer": lambda model: setattr(model, "optimizer", keras.optimizers.SGD(0.1)),
    "the optimizer built": lambda model: model.optimizer.build(model.trainable_variables),
    "compiled again": lambda model: model.compile("sgd", "mae"),
    "the loss": lambda model: setattr(model, "_compile_loss", None),
    "metrics": lambda model: setattr(model, "_compile_metrics", keras.metrics.Mean()),
    "eager": lambda model: setattr(model, "run_eagerly", True),
    "jit": lambda model: setattr(model, "jit_compile", not model.jit_compile),
    "steps per execution": lambda model: setattr(model, "steps_per_execution", 2),
    "quantised": lambda model: model.layers[0].quantize("int8"),
    "a layer in the place of another": _replace_layer,
    "weights in another order": lambda model: model.layers[0]._trainable_variables.reverse(),
    "recomputed by Keras": lambda model: setattr(model.layers[0], "_remat_mode", "full"),
}


def with_more_layers():
    model = network()
    model.add(layers.Dropout(0.1))
    model.add(layers.Activation("relu"))
    return model


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("change", CHANGES)
def test_the_fingerprint_sees(change):
    model = made(with_more_layers)
    before, again = Fingerprint(model), Fingerprint(model)
    assert before == again
    assert hash(before) == hash(again)
    CHANGES[change](model)
    assert Fingerprint(model) != before


def test_the_fingerprint_is_the_same_when_a_change_is_taken_back():
    model = made(network)
    before = Fingerprint(model)
    model.layers[1].trainable = False
    assert Fingerprint(model) != before
    model.layers[1].trainable = True
    assert Fingerprint(model) == before


@pytest.mark.parametrize(
    "change", ["a layer frozen", "a layer without weights frozen", "one weight frozen", "a policy"]
)
def test_plans_on_disk_are_for_the_model_as_it_is(change):
    model = made(with_more_layers)
    workload = describe(model, 4, "train", False, Target(True, (8, 0)), None)
    before = plan_cache.key(current(), model, workload, 2**30)
    CHANGES[change](model)
    assert plan_cache.key(current(), model, workload, 2**30) != before
