"""What changes between batches: callbacks, weights, layers that are frozen, and memory. Scripts hold copies of this."""

import keras
from here import BACKEND, out_of_memory
from hooks import _for_a_program, watched


def parts_with_weights(model):
    """Layers that have weights and are no models or wrappers, in order."""
    return [layer for layer in model._flatten_layers(include_self=False) if layer._trainable_variables]


def freeze(model, number, trainable=False):
    found = parts_with_weights(model)
    if found:
        found[number % len(found)].trainable = trainable


def scale_weights(model, factor):
    """Changes floating-point weights as a restored checkpoint would."""
    model.set_weights([w * factor if w.dtype.kind == "f" else w for w in model.get_weights()])


def replace_optimizer(model):
    """Another optimizer without another compile."""
    model.optimizer = keras.optimizers.Adam(0.02)
    model.optimizer.build(model.trainable_variables)


class At(keras.callbacks.Callback):
    """Does something once, before the batch with this number of the first epoch."""

    def __init__(self, batch):
        super().__init__()
        self.batch, self.epoch = batch, 0

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_begin(self, batch, logs=None):
        if self.epoch == 0 and batch == self.batch:
            self.do(self.model)


class ChangeRate(At):
    def do(self, model):
        model.optimizer.learning_rate = 0.003


class ScaleWeights(At):
    def do(self, model):
        scale_weights(model, 0.9)


class Freeze(At):
    def do(self, model):
        freeze(model, 0)


class FreezeAndRemake(At):
    def do(self, model):
        freeze(model, 0)
        model.make_train_function(force=True)


class EvaluateInside(At):
    """Predicts in the middle of training, as callbacks that show pictures do."""

    def do(self, model):
        model.predict(self.x, verbose=0)

    def __init__(self, batch, x):
        super().__init__(batch)
        self.x = x


class Watch(keras.callbacks.Callback):
    """Writes down the logs of every batch."""

    def __init__(self, log):
        super().__init__()
        self.log, self.number = log, 0

    def on_train_batch_end(self, batch, logs=None):
        self.log(f"logs of batch {batch}, seen {self.number}", dict(logs or {}))
        self.number += 1


# Memory that runs out


class Faults:
    """Counts how often points of a program are reached; those whose numbers are in the schedule run out of memory."""

    def __init__(self):
        self.start({})

    def start(self, schedule):
        self.schedule, self.counts, self.raised = schedule, {}, 0

    def reached(self, point, in_program=False):
        number = self.counts[point] = self.counts.get(point, -1) + 1
        if number in self.schedule.get(point, ()):
            self.raised += 1
            raise _for_a_program(out_of_memory()) if in_program else out_of_memory()

    def at(self, x, point):
        if BACKEND == "torch":  # NumPy has no bfloat16, and the value is not needed.
            if x.device.type != "meta":
                self.reached(point)
            return x
        return watched(x, lambda value: self.reached(point, in_program=True))

    def __deepcopy__(self, memo):
        return self


def failing(optimizer, faults):
    """The optimizer itself, with a point "update" for each variable."""
    original = optimizer.update_step

    def update_step(gradient, variable, learning_rate):
        if BACKEND == "tensorflow" and hasattr(gradient, "indices"):
            import tensorflow as tf

            values = faults.at(gradient.values, "update")
            gradient = tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
        else:
            gradient = faults.at(gradient, "update")
        original(gradient, variable, learning_rate)

    object.__setattr__(optimizer, "update_step", update_step)
    return optimizer


FAULTS = Faults()
