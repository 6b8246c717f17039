"""What oomproof uses of TensorFlow, and of Keras on it, beyond the public API.

Checked on TensorFlow 2.19 to 2.21.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from keras.src import ops as _ops
from keras.src.backend.tensorflow import random as _random
from keras.src.backend.tensorflow.core import name_scope as _name_scope
from keras.src.backend.tensorflow.optimizer import TFOptimizer as _TFOptimizer
from keras.src.optimizers.base_optimizer import BaseOptimizer as _BaseOptimizer

# list_local_devices(): a card's name and compute capability.
from tensorflow.python.client import device_lib as device_lib

# Function definitions of the eager context, which a lowered step needs one of.
from tensorflow.python.eager import context as context

# Gradients that are recorded by hand: stop_recording, VariableWatcher, should_record_backprop, record_operation.
from tensorflow.python.eager import record as record

# A concrete function as StableHLO.
from tensorflow.python.eager.polymorphic_function import compiler_ir as compiler_ir

# Tells a tape that a variable was read.
from tensorflow.python.eager.tape import variable_accessed as variable_accessed

# What the sizes in a graph are, where they can be computed.
from tensorflow.python.framework import tensor_util as tensor_util

# Which resources an op reads and writes.
from tensorflow.python.framework.auto_control_deps_utils import (
    get_read_write_resource_inputs as get_read_write_resource_inputs,
)

# Raised for a tensor of a loop or a function that is used outside of it.
from tensorflow.python.framework.errors_impl import InaccessibleTensorError as InaccessibleTensorError

# Grappler: a graph as TensorFlow would run it on a device, and the shapes in it.
from tensorflow.python.grappler import cluster as cluster
from tensorflow.python.grappler import item as item
from tensorflow.python.grappler import tf_optimizer as tf_optimizer

# Variables with a shape and no storage.
from tensorflow.python.ops import resource_variable_ops as resource_variable_ops

from oomproof._compat.patches import Patch, Redirect, Together

# Keras's random functions.
keras_random = _random
# A seed as the stateless functions of TensorFlow take it.
cast_seed = _random._cast_seed
# The methods of Keras's optimizer that write variables, without what TensorFlow makes of them.
NEUTRAL_UPDATES: dict[str, Callable[..., Any]] = {
    "_apply_weight_decay": _BaseOptimizer._apply_weight_decay,
    "_backend_update_step": _BaseOptimizer._backend_update_step,
    "_overwrite_model_variables_with_average_value": _BaseOptimizer._overwrite_model_variables_with_average_value,
    "_backend_increment_gradient_accumulators": _BaseOptimizer._backend_increment_gradient_accumulators,
}
# Says which layer opens which name scope.
NAME_SCOPE = Redirect(_name_scope, "__enter__")


def while_updating(
    is_updating: Callable[[], bool],
    methods: Mapping[str, Callable[..., Any]],
    cond: Callable[[Callable[..., Any]], Callable[..., Any]],
) -> Together:
    """TensorFlow's overrides of Keras's optimizer, which write past any scope, giving way to other methods.

    On the class, not the optimizer: optimizers hold others, and call what they override through super().

    Args:
        is_updating: Whether they do in this thread.
        methods: By name, what is called instead. A subclass's own method stays.
        cond: Makes another `keras.ops.cond` of Keras's, which optimizers use.
    """

    def giving_way(neutral: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def method(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            return (neutral if is_updating() else original)(optimizer, *args, **kwargs)

        return method

    patches = [Patch(_TFOptimizer, name, functools.partial(giving_way, method)) for name, method in methods.items()]
    return Together(*patches, Patch(_ops, "cond", cond))
