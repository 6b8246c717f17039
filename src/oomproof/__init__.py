"""Keras training that does not run out of memory.

Importing this imports no framework: each public name loads its room when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from oomproof._version import __version__
from oomproof.errors import (
    BackendError,
    CannotFitError,
    InexactWarning,
    OomproofError,
    RecoveryFailedError,
    UnsupportedModelError,
)
from oomproof.exactness import Exactness
from oomproof.findings import Checkup, Diagnosis, Evidence, Finding
from oomproof.records import Alternative, Device, Estimate, Event, Plan, Run
from oomproof.verification_record import Verification

if TYPE_CHECKING:
    from oomproof import data
    from oomproof.diagnosis.explaining import explain
    from oomproof.estimation.estimator import estimate, max_batch_size
    from oomproof.loops import gradients
    from oomproof.plans import plan
    from oomproof.training import fit, guard, unguard
    from oomproof.verification import verify

__all__ = [
    "Alternative",
    "BackendError",
    "CannotFitError",
    "Checkup",
    "Device",
    "Diagnosis",
    "Estimate",
    "Event",
    "Evidence",
    "Exactness",
    "Finding",
    "InexactWarning",
    "OomproofError",
    "Plan",
    "RecoveryFailedError",
    "Run",
    "UnsupportedModelError",
    "Verification",
    "__version__",
    "data",
    "estimate",
    "explain",
    "fit",
    "gradients",
    "guard",
    "max_batch_size",
    "plan",
    "unguard",
    "verify",
]

_ROOMS = {
    "explain": "oomproof.diagnosis.explaining",
    "estimate": "oomproof.estimation.estimator",
    "max_batch_size": "oomproof.estimation.estimator",
    "fit": "oomproof.training",
    "guard": "oomproof.training",
    "unguard": "oomproof.training",
    "gradients": "oomproof.loops",
    "plan": "oomproof.plans",
    "verify": "oomproof.verification",
}


def __getattr__(name: str) -> Any:
    if name == "data":
        return importlib.import_module("oomproof.data")
    if name in _ROOMS:
        return getattr(importlib.import_module(_ROOMS[name]), name)
    raise AttributeError(f"module 'oomproof' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
