"""A model ready to be traced, without its optimizer's slots and its metrics' state taking any memory.

Keras makes these in the first step. Here they are made on stand-ins of variables, which have a shape and a dtype but
no storage, in copies of the optimizer, the losses and the metrics, and the model gets its own back afterwards.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf
from keras import tree
from tensorflow.python.ops import resource_variable_ops

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
    kept = {name: vars(model)[name] for name in _MADE_LATE if name in vars(model)}
    try:
        with contextlib.nullcontext() if storage else without_storage():
            if phase != "predict":
                _put(model, "_compile_loss", _fresh_loss)
                _put(model, "_compile_metrics", _fresh_metrics)
            if phase == "train":
                _put(model, "optimizer", _fresh_optimizer)
            if phase != "predict":
                model._symbolic_build(data_batch=data)
            yield
    finally:
        vars(model).update(kept)


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


# What Keras fills in, or replaces, in the first step.
_MADE_LATE = ("optimizer", "_compile_loss", "_compile_metrics")


def _put(model: Any, name: str, fresh: Callable[[Any], Any]) -> None:
    # Not with setattr, which would have Keras track the copy as a part of the model for good.
    current = vars(model).get(name)
    if current is not None and not current.built:
        vars(model)[name] = fresh(current)


def _fresh_optimizer(optimizer: Any) -> Any:
    return type(optimizer).from_config(optimizer.get_config())


def _fresh_loss(loss: Any) -> Any:
    return type(loss)(_copied(loss._user_loss), loss._user_loss_weights, output_names=loss.output_names)


def _fresh_metrics(metrics: Any) -> Any:
    wanted, weighted = _copied(metrics._user_metrics), _copied(metrics._user_weighted_metrics)
    return type(metrics)(wanted, weighted, output_names=metrics.output_names)


def _copied(structure: Any) -> Any:
    """Losses and metrics as given to `compile`; those with a state of their own are made anew."""

    def copied(leaf: Any) -> Any:
        if not isinstance(leaf, keras.metrics.Metric):
            return leaf
        try:
            return type(leaf).from_config(leaf.get_config())
        except Exception:  # A metric of the user's own may have no config that can be read back.
            return copy.copy(leaf)

    return tree.map_structure(copied, structure)
