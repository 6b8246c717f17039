"""Data that does not eat the memory: what a pipeline will hold, the same pipeline within a budget, sources that stream.

Each name loads its file when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from oomproof.data.audit import audit
    from oomproof.data.audit_record import DataAudit, Stage
    from oomproof.data.tune import tune

__all__ = ["DataAudit", "Stage", "audit", "tune"]

_FILES = {
    "DataAudit": "oomproof.data.audit_record",
    "Stage": "oomproof.data.audit_record",
    "audit": "oomproof.data.audit",
    "tune": "oomproof.data.tune",
}


def __getattr__(name: str) -> Any:
    if name not in _FILES:
        raise AttributeError(f"module 'oomproof.data' has no attribute {name!r}")
    found = getattr(importlib.import_module(_FILES[name]), name)
    # `audit` and `tune` are also the names of files, which the import has just put in the functions' place.
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return __all__
