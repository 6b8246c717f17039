"""What oomproof uses of Keras, on any backend, beyond its public API.

Checked on Keras 3.13, 3.14 and 3.15 by the suite, and on its main branch (3.16) by the tests marked `seam`.
"""

from __future__ import annotations

import functools
from typing import Any

import keras

# Each thread's own: open scopes, the global seed generator, names that are taken.
from keras.src.backend.common import global_state as global_state

# Where the values of variables come from just now, or None.
from keras.src.backend.common.stateless_scope import get_stateless_scope as get_stateless_scope

# What every variable is, on any backend.
from keras.src.backend.common.variables import Variable as _Variable

# Makes the variables that wait for a scope to end.
from keras.src.backend.common.variables import initialize_all_variables as initialize_all_variables

# Layers that count their flops in a way of their own.
from keras.src.layers.convolutional.base_conv_transpose import BaseConvTranspose as BaseConvTranspose
from keras.src.losses import loss as _loss

# squeeze_or_expand_to_same_rank(values, weights): how weights and masks are lined up with losses.
from keras.src.losses.loss import squeeze_or_expand_to_same_rank as squeeze_or_expand_to_same_rank

# Models, and what runs them call by call.
from keras.src.models.functional import Functional as Functional

# What a model inherits its training from: other than `keras.Model`, it knows what it has overridden.
from keras.src.models.model import Trainer as Trainer

# Operations that are called as such in a graph, for their flops and their shapes.
from keras.src.ops.function import Function as Function
from keras.src.ops.nn import DotProductAttention as DotProductAttention
from keras.src.ops.numpy import Einsum as Einsum
from keras.src.ops.numpy import Matmul as Matmul
from keras.src.ops.numpy import Reshape as Reshape

# Turns what a random function is given for a seed into numbers, and advances its generator.
from keras.src.random.seed_generator import draw_seed as draw_seed

# What Keras saves: layers, optimizers, metrics, losses.
from keras.src.saving.keras_saveable import KerasSaveable as KerasSaveable

# How Keras makes batches of data, what class weights become, and the signature of batches.
from keras.src.trainers import data_adapters as _data_adapters

# Wrap what `compile` was given.
from keras.src.trainers.compile_utils import CompileLoss as CompileLoss
from keras.src.trainers.compile_utils import CompileMetrics as CompileMetrics
from keras.src.trainers.data_adapters import data_adapter_utils as data_adapter_utils
from keras.src.trainers.data_adapters.py_dataset_adapter import PyDatasetAdapter as PyDatasetAdapter

# Whether XLA can compile a model; `compile` asks it.
from keras.src.trainers.trainer import model_supports_jit as model_supports_jit

# Packages that are imported when they are first used.
from keras.src.utils import module_utils as _module_utils

# Whether JAX is tracing.
from keras.src.utils.jax_utils import is_in_jax_tracing_scope as is_in_jax_tracing_scope

from oomproof._compat.patches import Patch, Redirect

# A layer's or a function's results, from specs alone. The module is patched while TensorFlow is traced.
_backend = keras.src.backend
# TensorFlow, imported when it is first used: batches are its datasets there.
lazy_tensorflow = _module_utils.tensorflow
# The mask that a tensor carries.
get_keras_mask = _backend.get_keras_mask
set_keras_mask = _backend.set_keras_mask
standardize_dtype = _backend.standardize_dtype

# The attributes of Keras's objects that are read, written or overridden on the user's own model, none of them public,
# with what for. A test sees that they are all that is used, and that the installed Keras has them.
ATTRIBUTES: dict[str, dict[str, str]] = {
    "layer": {
        "_called": "put back after a trace: being traced is not being called",
        "_dtype_policy": "the precision a plan asks for; the public one cannot be set",
        "_flatten_layers": "every layer at any depth",
        "_inbound_nodes": "whether a layer is shared",
        "_is_quantized": "part of what a step depends on",
        "_layers": "the layers directly inside of a layer",
        "_loss_ids": "which layer added a loss inside of a scope",
        "_losses": "losses added outside of one",
        "_losses_override": "what `losses` says during Keras's own loss on JAX",
        "_non_trainable_variables": "a layer's own, without those of the layers in it",
        "_remat_mode": "part of what a step depends on",
        "_seed_generators": "where a layer's random numbers come from",
        "_trainable": "part of what a step depends on, without what is around it",
        "_trainable_variables": "a layer's own, without those of the layers in it",
        "_call_has_training_arg": "whether `call` is told that it trains",
        "_clear_losses": "what Keras's own step begins with",
        "_build_shapes_dict": "input shapes that a built model knows",
    },
    "batch normalization": {
        "_moments": "mean and variance of a piece, recorded to advance the moving ones once a batch",
        "_reduction_axes": "what they are taken over",
        "_update_renorm_statistics": "advances the statistics of renormalisation; where Keras has it",
    },
    "model": {
        "_assert_compile_called": "Keras's own error for a model that is not compiled",
        "_compile_loss": "the losses, and whether each is a sum over samples",
        "_compile_metrics": "the metrics, likewise",
        "_compute_loss": "what a step calls: compute_loss, with what it needs",
        "_jit_compile": "part of what a step depends on",
        "_loss_tracker": "the metric that shows the loss, fed once a batch",
        "_run_eagerly": "part of what a step depends on",
        "_symbolic_build": "builds metrics and losses from shapes",
    },
    "functional model": {
        "_inputs_struct": "the inputs as the user nested them",
        "_nodes_by_depth": "the calls, in the order Keras makes them",
        "_outputs_struct": "the outputs, likewise nested",
        "_run_through_graph": "overridden on the instance: runs the calls, some of them again",
    },
    "sequential model": {
        "_functional": "the graph of its layers",
    },
    "compiled loss": {
        "_flat_losses": "each loss with its output and its weight",
        "_user_loss": "what `compile` was given, to make a fresh one and to know what it will be",
        "_user_loss_weights": "likewise",
    },
    "compiled metrics": {
        "_user_metrics": "what `compile` was given, to make fresh ones",
        "_user_weighted_metrics": "likewise",
    },
    "metric": {
        "_fn": "what a metric or a loss computes of targets and predictions",
        "_fn_kwargs": "the axis it does that over",
    },
    "optimizer": {
        "_backend_update_step": "overridden on the instance: one variable after the other",
        "_get_variable_index": "which slots belong to a weight",
        "_trainable_variables": "the weights it was built for",
        "_variables": "every variable it has",
    },
    "variable": {
        "_value": "the tensor itself, past any scope",
    },
    "data adapter": {
        "_standardize_batch": "class weights, and batches as tuples",
    },
    "model on TensorFlow": {
        "_distribute_strategy": "whether a model belongs to several devices",
    },
    "model on JAX": {
        "_jax_state": "what Keras keeps of a model's values during an epoch",
        "_jax_state_synced": "whether that has been put back",
    },
}
# Not in every supported Keras.
SOME_HAVE = {"_is_quantized", "_update_renorm_statistics"}


class Carried:
    """A value of the thread that a segment finds again when it is recomputed, in whatever thread that happens.

    Args:
        name: Under which Keras's state of the thread has it.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    @property
    def value(self) -> Any:
        return global_state.get_global_attribute(self._name)

    @value.setter
    def value(self, value: Any) -> None:
        global_state.set_global_attribute(self._name, value)


# How the values of a loss become one number. All of Keras's losses share it.
LOSS_REDUCTION = Redirect(_loss, "reduce_weighted_values")
# What a model returns, from the shapes it is given, as Keras asks for it while it builds losses and metrics.
OUTPUT_SPEC = Redirect(_backend, "compute_output_spec")
# A variable as it is made: one that is given a value cannot be made inside of a scope.
VARIABLE = Redirect(_Variable, "__init__")


def adapting(kind: type, adapter: type) -> Patch:
    """Has Keras make an adapter of ours for a kind of `PyDataset`."""

    def adapters(original: Any) -> Any:
        @functools.wraps(original, updated=())
        def adapted(x: Any, *args: Any, **kwargs: Any) -> Any:
            return (adapter if isinstance(x, kind) else original)(x, *args, **kwargs)

        return adapted

    return Patch(_data_adapters, "PyDatasetAdapter", adapters)


def compute_output_spec(*args: Any, **kwargs: Any) -> Any:
    """Specs of what a function returns, from specs of its arguments."""
    return _backend.compute_output_spec(*args, **kwargs)
