"""Train Keras models at the batch size you want, in the memory you have.

- `guard`, `fit`: training goes on after an out-of-memory error, with the same result. `unguard` puts Keras back.
- `estimate`, `max_batch_size`: how much memory a step will take, before it runs.
- `plan`: how to run a batch that does not fit. `verify`: whether that is the same training.
- `explain`: why training failed. `data`: audit, tune and stream what a model is fed.
- `gradients`: full-batch gradients in pieces, for your own loop.

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

if TYPE_CHECKING:
    from oomproof import data
    from oomproof._estimation.api import estimate, max_batch_size
    from oomproof._explain.api import explain
    from oomproof._planning.api import plan
    from oomproof._records.diagnosis import Checkup, Diagnosis, Evidence, Finding
    from oomproof._records.estimate import Estimate
    from oomproof._records.exactness import Exactness
    from oomproof._records.plan import Alternative, Plan
    from oomproof._records.run import Device, Event, Run
    from oomproof._records.verification import Verification
    from oomproof._training.gradients import gradients
    from oomproof._training.guard import fit, guard, unguard
    from oomproof._training.verify import verify

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
    "Alternative": "oomproof._records.plan",
    "Checkup": "oomproof._records.diagnosis",
    "Device": "oomproof._records.run",
    "Diagnosis": "oomproof._records.diagnosis",
    "Estimate": "oomproof._records.estimate",
    "Event": "oomproof._records.run",
    "Evidence": "oomproof._records.diagnosis",
    "Exactness": "oomproof._records.exactness",
    "Finding": "oomproof._records.diagnosis",
    "Plan": "oomproof._records.plan",
    "Run": "oomproof._records.run",
    "Verification": "oomproof._records.verification",
    "explain": "oomproof._explain.api",
    "estimate": "oomproof._estimation.api",
    "max_batch_size": "oomproof._estimation.api",
    "fit": "oomproof._training.guard",
    "guard": "oomproof._training.guard",
    "unguard": "oomproof._training.guard",
    "gradients": "oomproof._training.gradients",
    "plan": "oomproof._planning.api",
    "verify": "oomproof._training.verify",
}


def __getattr__(name: str) -> Any:
    if name == "data":
        return importlib.import_module("oomproof.data")
    if name in _ROOMS:
        return getattr(importlib.import_module(_ROOMS[name]), name)
    raise AttributeError(f"module 'oomproof' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
