"""Updates of an optimizer, traced for one weight of a kind and made again, op by op and name by name, for the others.

Keras builds the update of each weight in Python, a third of the time it takes to trace a step of a deep model, though
all weights of one shape get the same ops. What is made here is the same graph that Keras would have made.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from oomproof._compat.tensorflow import resource_variable_ops

# Whose update looks at nothing of a weight but its shape, its dtype and its slots.
_NAMES = ("SGD", "Adam", "AdamW", "RMSprop", "Adagrad", "Adadelta", "Adamax", "Lion")
_KNOWN = {getattr(keras.optimizers, name) for name in _NAMES}
_NOT_SLOTS = {"_variables", "_trainable_variables"}


@dataclasses.dataclass(frozen=True, slots=True)
class _Made:
    """An update that Keras made: its ops, and what tensors that are the weight's own, by name, are to the weight."""

    ops: Sequence[Any]
    own: dict[str, str]


@contextlib.contextmanager
def repeated_updates(model: Any) -> Iterator[None]:
    """In this block updates by the model's optimizer are traced once for each kind of weight."""
    optimizer = getattr(model, "optimizer", None)
    if type(optimizer) not in _KNOWN:
        yield
        return
    repeating = _Repeating(optimizer)
    # Not through `__setattr__`, which would have Keras look at it.
    vars(optimizer)["update_step"] = repeating.update_step
    try:
        yield
    finally:
        del vars(optimizer)["update_step"]


class _Repeating:
    """What stands in the place of an optimizer's `update_step`."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self._original = optimizer.update_step
        self._made: dict[Any, _Made] = {}
        self._first = True

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        graph = tf.compat.v1.get_default_graph()
        if tf.executing_eagerly() or not isinstance(gradient, tf.Tensor) or self._first:
            # The first one also makes what all share.
            self._first = False
            self._original(gradient, variable, learning_rate)
            return
        key = (graph, tuple(variable.shape), variable.dtype, tuple(gradient.shape), gradient.dtype, id(learning_rate))
        own = self._own(variable)
        if key not in self._made:
            before = len(graph.get_operations())
            self._original(gradient, variable, learning_rate)
            ops = graph.get_operations()[before:]
            handles = {id(outer): inner.name for outer, inner in graph.captures}
            names = {handles[id(v.handle)]: role for role, v in own.items() if id(v.handle) in handles}
            self._made[key] = _Made(ops, {gradient.name: "gradient", **names})
            return
        _repeat(graph, self._made[key], own, gradient)

    def _own(self, variable: Any) -> dict[str, Any]:
        """The weight and its slots, by name of the list they are in."""
        index = self._optimizer._get_variable_index(variable)
        count = len(self._optimizer._trainable_variables)
        found: dict[str, Any] = {"weight": variable}
        for name, value in vars(self._optimizer).items():
            of_weights = name not in _NOT_SLOTS and isinstance(value, list) and len(value) == count
            if of_weights and isinstance(value[index], keras.Variable):
                found[name] = value[index].value
        return found


def _repeat(graph: Any, made: _Made, own: dict[str, Any], gradient: Any) -> None:
    """Makes the ops of an update again, for another weight, with the names that Keras would have given them."""
    scope = graph.get_name_scope()
    skip = len(scope) + 1 if scope else 0
    scopes: dict[str, str] = {}
    tensors: dict[str, Any] = {}
    ops: dict[str, Any] = {}

    def mapped(tensor: Any) -> Any:
        if tensor.name in tensors:
            return tensors[tensor.name]
        role = made.own.get(tensor.name)
        if role is None:
            return tensor
        return gradient if role == "gradient" else graph.capture(own[role].handle)

    for op in made.ops:
        first, *rest = op.name[skip:].split("/")
        if first not in scopes:
            scopes[first] = graph.unique_name(re.sub(r"_\d+$", "", first))
        name = "/".join([scopes[first], *rest]) + "/"
        if op.type == "Placeholder":
            variable = own[made.own[op.outputs[0].name]]
            resource_variable_ops.variable_accessed(variable)
            tensors[op.outputs[0].name] = graph.capture(variable.handle, name=name)
            continue
        controls = [ops.get(control.name, control) for control in op.control_inputs]
        with graph.control_dependencies(controls) if controls else contextlib.nullcontext():
            again = graph._create_op_internal(
                op.type,
                [mapped(tensor) for tensor in op.inputs],
                [tensor.dtype for tensor in op.outputs],
                name=name,
                attrs=dict(op.node_def.attr),
                op_def=op.op_def,
            )
        ops[op.name] = again
        tensors.update((old.name, new) for old, new in zip(op.outputs, again.outputs, strict=True))
