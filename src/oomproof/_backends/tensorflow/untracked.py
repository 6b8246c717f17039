"""tf.Variables that are not Keras's: what a layer writes to them cannot wait, and counts once a piece."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from oomproof._backends.common.model import call, layers
from oomproof._backends.tensorflow.pieces import placeholders
from oomproof._backends.tensorflow.writes import PendingWrites
from oomproof._compat.names import is_kerass
from oomproof._compat.tensorflow import get_read_write_resource_inputs

# These take hold of a variable and leave it as it is.
_PASS_ON = {"Identity", "IdentityN"}


def written_outside(model: Any, x: Any) -> list[Any]:
    """Handles of tf.Variables that the model writes while it trains, and that no scope of Keras holds back."""
    if all(_is_kerass(layer) for layer in layers(model)):
        return []
    graph = tf.__internal__.FuncGraph("writes_of_a_call")
    try:
        # What Keras variables are given stays in the scope, so every write in this graph is to another one.
        with graph.as_default(), PendingWrites(model.trainable_variables):
            call(model, placeholders(x), True)
    except Exception:
        # Code that only runs eagerly cannot be looked at this way: any that it could write may be written.
        return [variable.handle for _, variable in _kept_by_layers(model)]
    operations = [operation for operation in graph.get_operations() if operation.type not in _PASS_ON]
    written = {id(handle) for op in operations for handle in get_read_write_resource_inputs(op)[1]}
    # Other resources, such as tables, do not say what is in them.
    return [outer for outer, inner in graph.captures if id(inner) in written and _dtype(outer) is not None]


def _dtype(handle: Any) -> Any:
    described = getattr(handle, "_handle_data", None)
    kinds: Sequence[Any] = described.shape_and_type if described is not None and described.is_set else ()
    return tf.as_dtype(kinds[0].dtype) if len(kinds) == 1 else None


def _is_kerass(layer: Any) -> bool:
    own_code = isinstance(layer, keras.layers.Lambda)
    return is_kerass(type(layer)) and not own_code


def _kept_by_layers(model: Any) -> Iterator[tuple[str, tf.Variable]]:
    """tf.Variables among the attributes of layers, or in lists and dictionaries that are, by name."""
    for layer in layers(model):
        for name, value in vars(layer).items():
            several = value.values() if isinstance(value, dict) else value
            for leaf in several if isinstance(value, dict | list | tuple) else [value]:
                if isinstance(leaf, tf.Variable):
                    yield f"{layer.path or layer.name}.{name}", leaf


def caveats(model: Any, handles: Sequence[Any]) -> tuple[str, ...]:
    """What cutting a batch changes for the variables, in words."""
    names = {id(variable.handle): name for name, variable in _kept_by_layers(model)}
    return tuple(
        f"{names.get(id(handle), 'a variable')} is a tf.Variable, so it is written once for each piece and not once a "
        "batch; one that `add_weight` makes is averaged over pieces"
        for handle in handles
    )


@contextlib.contextmanager
def unchanged(handles: Sequence[Any], on_failure_only: bool = False) -> Iterator[None]:
    """Puts the variables back at the end, or only if something is raised."""
    before = [tf.raw_ops.ReadVariableOp(resource=handle, dtype=_dtype(handle)) for handle in handles]
    kept = False
    try:
        yield
        kept = on_failure_only
    finally:
        if not kept:
            for handle, value in zip(handles, before, strict=True):
                tf.raw_ops.AssignVariableOp(resource=handle, value=value)
