"""Models of layers of one shape, and what people do to models without compiling them again."""

import keras
import numpy as np
from keras import layers

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
