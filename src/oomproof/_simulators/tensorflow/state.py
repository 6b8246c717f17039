"""A model ready to be traced, without its optimizer's slots and its metrics' state taking any memory.

Keras makes these in the first step. Here they are made on stand-ins of variables, which have a shape and a dtype but
no storage, in copies of the optimizer, the losses and the metrics, and the model gets its own back afterwards.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from oomproof._backends.common.call_graph import graph_of
from oomproof._backends.common.unbuilt import copies_of_unbuilt
from oomproof._compat.keras import OUTPUT_SPEC
from oomproof._compat.tensorflow import resource_variable_ops
from oomproof._records.run import Phase

_SHARED_FROM = 2**14  # Elements of a variable; what is smaller is not worth it.


@contextlib.contextmanager
def traceable(model: Any, data: Any, phase: Phase, storage: bool = False) -> Iterator[None]:
    """The model with everything built that a step on such data needs, until the block is left.

    Args:
        model: A model that is built and compiled.
        data: What its step is given, with a `tf.TensorSpec` in the place of each tensor.
        phase: The step that is to be traced.
        storage: Give what is made here memory and values all the same, as little as will do.
    """
    with copies_of_unbuilt(model), sharing_storage() if storage else without_storage():
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

    def of_model(original: Any, function: Any, *args: Any, **kwargs: Any) -> Any:
        if function is model:
            return model.compute_output_spec(*args, **kwargs)
        return original(function, *args, **kwargs)

    with OUTPUT_SPEC.to(of_model):
        yield


def without_storage() -> contextlib.AbstractContextManager[Any]:
    """Variables made in this block have no storage: they can be traced with, but not run."""
    scratch = tf.__internal__.FuncGraph("initial_values")

    def stand_in(_: Any, **given: Any) -> Any:
        initial = _initial(given, scratch)
        return resource_variable_ops.UninitializedVariable(
            shape=initial.shape,
            dtype=initial.dtype,
            **{name: given.get(name) for name in ("trainable", "name", "synchronization", "aggregation")},
        )

    scope: contextlib.AbstractContextManager[Any] = tf.variable_creator_scope(stand_in)
    return scope


def sharing_storage() -> contextlib.AbstractContextManager[Any]:
    """Large variables made in this block have values, as lowering asks for, but all of a shape the same memory.

    Their values are not those they should have, which lowering does not look at.
    """
    scratch = tf.__internal__.FuncGraph("initial_values")
    zeros: dict[Any, Any] = {}

    def sharing(make: Any, **given: Any) -> Any:
        initial = _initial(given, scratch)
        if not initial.shape.is_fully_defined() or initial.shape.num_elements() < _SHARED_FROM:
            return make(**given)
        key = (tuple(initial.shape), initial.dtype)
        if key not in zeros:
            zeros[key] = tf.zeros(*key)
        # A variable that is given a tensor refers to it, and makes a copy once it is written to.
        return make(**given | {"initial_value": zeros[key]})

    scope: contextlib.AbstractContextManager[Any] = tf.variable_creator_scope(sharing)
    return scope


def _initial(given: dict[str, Any], scratch: Any) -> Any:
    """A tensor like a variable's first value. Only its shape is wanted: as part of a graph it computes nothing."""
    initial = given["initial_value"]
    if not callable(initial):
        return tf.convert_to_tensor(initial, given.get("dtype"))
    with scratch.as_default():
        return tf.convert_to_tensor(initial(), given.get("dtype"))
