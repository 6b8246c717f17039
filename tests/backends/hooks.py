"""Code of a test that runs inside of a program, whenever the program does: to see values, and to raise errors there.

A graph or a compiled program calls no Python of ours but through these. The values pass through unchanged.
"""

import collections

import keras
import numpy as np
from here import BACKEND
from keras import layers, ops


def watched(x, see):
    """The tensor itself; `see(array)` is called with its value each time this point is reached, in every mode."""
    if BACKEND == "tensorflow":
        import tensorflow as tf

        with tf.control_dependencies([tf.py_function(lambda value: see(value.numpy()), [x], [])]):
            return tf.identity(x)
    if BACKEND == "jax":
        import jax

        def call(value):
            see(np.asarray(value))
            return np.zeros((), x.dtype)

        # Depends on the value and is part of it, so that it is neither moved out of a loop nor left out.
        return x + jax.pure_callback(call, jax.ShapeDtypeStruct((), x.dtype), ops.stop_gradient(x))
    if x.device.type != "meta":  # While Keras only asks for shapes.
        see(x.detach().cpu().numpy())
    return x


class Faults:
    """Counts how often points of a program are reached, and raises an error where it is told to.

    `arm(point, number, error)` makes the call with that number from now on, counted from 0, raise; without a number
    every call.
    """

    def __init__(self):
        self.disarm()

    def disarm(self):
        self.counts, self.target, self.error, self.raised = collections.Counter(), None, None, False

    def arm(self, point, number, error):
        self.disarm()
        self.target, self.error = (point, number), error

    def reached(self, point, in_program=False):
        number = self.counts[point]
        self.counts[point] += 1
        if self.target in ((point, number), (point, None)):
            self.raised = True
            raise _for_a_program(self.error) if in_program else self.error

    def at(self, x, point):
        return watched(x, lambda value: self.reached(point, in_program=True))

    def __deepcopy__(self, memo):
        return self


def _for_a_program(error):
    """TensorFlow hands a Python error on by its kind: what is a MemoryError here is a ResourceExhaustedError there."""
    if BACKEND == "tensorflow" and type(error).__name__ == "ResourceExhaustedError":
        return MemoryError(error.message)
    return error


class Faulty(layers.Layer):
    """Passes its input on. Points: "tracing" when Python runs it, "forward" and "backward" when the program does."""

    def __init__(self, faults, **options):
        super().__init__(**options)
        object.__setattr__(self, "faults", faults)
        self.supports_masking = True

    def call(self, x):
        self.faults.reached("tracing")
        if BACKEND == "torch":
            x = self.faults.at(x * 1.0, "forward")
            if x.requires_grad:
                x.register_hook(lambda gradient: self.faults.at(gradient, "backward"))
            return x

        @ops.custom_gradient
        def through(x):
            def backward(*args, upstream=None):
                return self.faults.at(args[0] if upstream is None else upstream, "backward")

            return self.faults.at(x, "forward"), backward

        return through(x)


class FaultySGD(keras.optimizers.SGD):
    """Points: "update", once for each variable."""

    def __init__(self, faults, *args, **kwargs):
        super().__init__(*args, **kwargs)
        object.__setattr__(self, "faults", faults)

    def update_step(self, gradient, variable, learning_rate):
        super().update_step(self.faults.at(gradient, "update"), variable, learning_rate)
