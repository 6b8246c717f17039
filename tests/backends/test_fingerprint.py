"""What a guard sees of a model that is changed and not compiled again, what it keeps, and that it stays in place."""

import keras
import pytest
from changes import X, Y, fit, network
from keras import layers
from models import made

import oomproof
from oomproof._backends import current
from oomproof._backends.common.fingerprint import Fingerprint
from oomproof._estimation.workloads import describe
from oomproof._planning import plan_cache
from oomproof._records.trace import Target

pytestmark = pytest.mark.usefixtures("float64")

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
