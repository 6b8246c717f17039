"""Which layer a name scope of the graph belongs to.

TensorFlow numbers scopes that have the same name, so that a layer `conv2d` may compute in a scope `conv2d_1` beside a
layer of just that name. What Keras opens is noted instead of guessed from the names.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from oomproof._compat.keras import global_state
from oomproof._compat.tensorflow import NAME_SCOPE

OPTIMIZER = "\0optimizer"


@contextlib.contextmanager
def noted_scopes() -> Iterator[dict[str, str]]:
    """Yields a dict that fills with the layer's path, or `OPTIMIZER`, of each scope opened in the block."""
    scopes: dict[str, str] = {}

    def noting(enter: Any, scope: Any) -> Any:
        result = enter(scope)
        callers = [entry.caller for entry in global_state.get_global_attribute("name_scope_stack") or ()]
        if isinstance(scope.caller, keras.optimizers.Optimizer):
            scopes[tf.get_current_name_scope()] = OPTIMIZER
        elif isinstance(scope.caller, keras.layers.Layer):
            layers = [caller.name for caller in callers if isinstance(caller, keras.layers.Layer)]
            # The first is the model itself.
            scopes[tf.get_current_name_scope()] = "/".join(layers[1:])
        return result

    with NAME_SCOPE.to(noting):
        yield scopes


def layer_paths(model: Any) -> dict[int, str]:
    """The path of the layer each variable belongs to, by `id` of the variable."""
    found: dict[int, str] = {}

    def visit(layer: Any, path: str) -> None:
        for part in layer._layers:
            visit(part, f"{path}/{part.name}" if path else part.name)
        for variable in layer.variables:
            found.setdefault(id(variable), path)

    visit(model, "")
    return found
