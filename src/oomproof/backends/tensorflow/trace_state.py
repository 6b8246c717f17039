"""A model ready to be traced, without its optimizer's slots and its metrics' state taking any memory.

Keras makes these in the first step. Here they are made on stand-ins of variables, which have a shape and a dtype but
no storage, in copies of the optimizer, the losses and the metrics, and the model gets its own back afterwards.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import tensorflow as tf
from keras.src import backend as keras_backend
from tensorflow.python.ops import resource_variable_ops

from oomproof.backends.common.calls import graph_of
from oomproof.backends.common.fresh import fresh_parts
from oomproof.records import Phase


@contextlib.contextmanager
def traceable(model: Any, data: Any, phase: Phase, storage: bool = False) -> Iterator[None]:
    """The model with everything built that a step on such data needs, until the block is left.

    Args:
        model: A model that is built and compiled.
        data: What its step is given, with a `tf.TensorSpec` in the place of each tensor.
        phase: The step that is to be traced.
        storage: Give what is made here memory and values all the same.
    """
    with fresh_parts(model), contextlib.nullcontext() if storage else without_storage():
        if phase != "predict":
            with _outputs_from_graph(model):
                model._symbolic_build(data_batch=data)
        yield


@contextlib.contextmanager
def _outputs_from_graph(model: Any) -> Iterator[None]:
    """In this block Keras learns what a model returns from the shapes of its layers, where these say it.

    It would trace the whole model, for nothing but the shapes that losses and metrics are built for.
    """
    if graph_of(model) is None or not all(layer.built for layer in model._flatten_layers()):
        yield
        return
    original = keras_backend.compute_output_spec

    def compute_output_spec(function: Any, *args: Any, **kwargs: Any) -> Any:
        return (model.compute_output_spec if function is model else functools.partial(original, function))(
            *args, **kwargs
        )

    keras_backend.compute_output_spec = compute_output_spec
    try:
        yield
    finally:
        keras_backend.compute_output_spec = original


def without_storage() -> contextlib.AbstractContextManager[Any]:
    """Variables made in this block have no storage: they can be traced with, but not run."""

    def stand_in(_: Any, **given: Any) -> Any:
        initial = given["initial_value"]
        if callable(initial):
            # Only its shape is wanted. As part of a graph that is thrown away, it computes nothing.
            with tf.__internal__.FuncGraph("initial_value").as_default():
                initial = tf.convert_to_tensor(initial(), given.get("dtype"))
        else:
            initial = tf.convert_to_tensor(initial, given.get("dtype"))
        return resource_variable_ops.UninitializedVariable(
            shape=initial.shape,
            dtype=initial.dtype,
            **{name: given.get(name) for name in ("trainable", "name", "synchronization", "aggregation")},
        )

    scope: contextlib.AbstractContextManager[Any] = tf.variable_creator_scope(stand_in)
    return scope
