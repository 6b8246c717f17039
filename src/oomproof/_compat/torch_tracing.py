"""What oomproof uses of torch, and of Keras on it, beyond the public API, to trace a step with shapes for data.

Checked on torch 2.11 and 2.13.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch

# Tensors with a shape and no data, and what they raise where data would be needed.
from torch._subclasses.fake_tensor import DataDependentOutputException as DataDependentOutputException
from torch._subclasses.fake_tensor import DynamicOutputShapeException as DynamicOutputShapeException
from torch._subclasses.fake_tensor import FakeTensor as _FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch.utils import checkpoint as _checkpoint

# Sees every op below autograd.
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode

from oomproof._compat.patches import Redirect

# What code of Keras's and the user's is told when it asks a tensor where it is.
DEVICE = Redirect(_FakeTensor, "device")
# The backward pass, which calls layers that are computed again.
RUN_BACKWARD = Redirect(torch.autograd, "_engine_run_backward")
# How a recomputed tensor is described, to be compared with the first one.
DESCRIBED = Redirect(_checkpoint._allowed_determinism_checks_to_fns, "default")
# Recurrent layers in one kernel.
LSTM, GRU = torch._VF.lstm, torch._VF.gru


@functools.cache
def of_keras(module: str, name: str) -> Redirect | None:
    """A function of Keras's on torch; `None` in a Keras that has no such function."""
    owner = importlib.import_module(f"keras.src.backend.torch.{module}")
    return Redirect(owner, name) if hasattr(owner, name) else None


# The node of autograd that an op is run for; None in a forward pass.
current_autograd_node: Callable[[], Any] = torch._C._current_autograd_node
# The number that autograd gives its next node.
next_sequence_number: Callable[[], int] = torch.autograd._get_sequence_nr


def users_of(storage: Any) -> int:
    """How many tensors and Python objects share a storage."""
    return int(torch._C._storage_Use_Count(storage._cdata))
