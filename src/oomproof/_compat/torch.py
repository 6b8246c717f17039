"""What oomproof uses of torch, and of Keras on it, beyond the public API, to train.

Checked on torch 2.11 and 2.13.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import torch
from keras.src.backend.torch import random as _random
from keras.src.backend.torch import trainer as _trainer

# Where Keras puts tensors, and how.
from keras.src.backend.torch.core import convert_to_tensor as convert_to_tensor
from keras.src.backend.torch.core import device_scope as device_scope
from keras.src.backend.torch.core import get_device as get_device
from keras.src.backend.torch.core import to_torch_dtype as to_torch_dtype
from keras.src.tree import torchtree_impl as _torchtree

# What torch.compile raises for code it cannot compile.
from torch._dynamo.exc import TorchDynamoException as TorchDynamoException

# Nested structures as torch flattens them, its own containers included.
from torch.utils._pytree import tree_flatten as tree_flatten
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_unflatten as tree_unflatten

from oomproof._compat.keras import Carried
from oomproof._compat.patches import Redirect
from oomproof._compat.versions import at_least

# Keras's random functions.
keras_random = _random
# What Keras's Dropout without a seed calls, and torch's own.
DROPOUT = Redirect(torch.nn.functional, "dropout", Carried("oomproof_dropout"))
# What Keras's losses of classes call, with the classes on the second axis.
CROSS_ENTROPY = Redirect(torch.nn.functional, "cross_entropy")
NLL_LOSS = Redirect(torch.nn.functional, "nll_loss")
# What Keras reads batches with. It makes one in every call of `fit`, where nothing of ours is asked.
EPOCH_ITERATOR = Redirect(_trainer, "TorchEpochIterator")

# Keras's walks through nested data: found again by what is recomputed, which on GPUs happens in a thread of torch's.
_walks = {name: name in vars(_torchtree) for name in ("_dict_to_ordered_dict", "traverse", "_tree_is_leaf")}
DICTS_IN_ORDER, TRAVERSE = (
    (
        Redirect(_torchtree, "_dict_to_ordered_dict", Carried("oomproof_dicts_in_order")),
        Redirect(_torchtree, "traverse", Carried("oomproof_traverse")),
    )
    if all(_walks.values())
    else (None, None)
)


def dict_in_order(structure: Any) -> Any:
    """A structure whose dicts are in the order of their keys, as Keras, or whoever answers for it, puts them."""
    return _torchtree._dict_to_ordered_dict(structure)


def is_leaf(structure: Any) -> bool:
    """Whether Keras's walks go no further."""
    return bool(_torchtree._tree_is_leaf(structure))


def updates_all_at_once(kind: type) -> bool:
    """Whether an optimizer is one that Keras updates all variables of in one call."""
    return kind.__module__.startswith("keras.src.backend.torch.optimizers.")


def is_traced(tensors: Sequence[Any]) -> bool:
    """Whether any of them is a shape without data."""
    return torch._guards.detect_fake_mode(tensors) is not None


def cloned(values: Sequence[Any]) -> list[Any]:
    """Copies of tensors, in few kernels where this torch can."""
    clone_all = getattr(torch, "_foreach_clone", None)
    return list(clone_all(list(values))) if clone_all is not None else [value.clone() for value in values]


def copy_all(targets: list[Any], sources: list[Any]) -> None:
    """Writes each source to its target, in few kernels."""
    torch._foreach_copy_(targets, sources)


def mps_generator() -> Any:
    """What unseeded numbers come from on Apple's GPUs."""
    return torch.mps._get_default_mps_generator()


def set_allocator(settings: str) -> None:
    """Settings of the GPU's allocator, as in PYTORCH_CUDA_ALLOC_CONF, in a process that has begun to use it."""
    tell = getattr(torch._C, "_accelerator_setAllocatorSettings", None) or torch.cuda.memory._set_allocator_settings
    tell(settings)


# From 3.16 on, Keras runs several steps in one call on torch, and wraps the model for several processes by itself.
RUNS_SEVERAL_STEPS = at_least(keras.__version__, "3.16")


def is_distributed(model: Any) -> bool:
    """Whether Keras itself would train the model in several processes."""
    return hasattr(model, "ddp_model") and torch.distributed.is_available() and torch.distributed.is_initialized()


# What all layers of batch normalisation, and all dropouts, of torch itself are.
NormBase = torch.nn.modules.batchnorm._NormBase
DropoutNd = torch.nn.modules.dropout._DropoutNd
