"""Data within the memory you have: audit a pipeline, tune it to a budget, or stream data larger than memory.

Each name loads its file when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from oomproof.data.audit_record import DataAudit, Stage
    from oomproof.data.auditing import audit
    from oomproof.data.sources.arrays import from_arrays
    from oomproof.data.sources.generators import from_generator
    from oomproof.data.sources.images import from_files
    from oomproof.data.sources.tables import from_table
    from oomproof.data.sources.tfrecords import from_records
    from oomproof.data.stream import Stream
    from oomproof.data.tuning import tune

__all__ = [
    "DataAudit",
    "Stage",
    "Stream",
    "audit",
    "from_arrays",
    "from_files",
    "from_generator",
    "from_records",
    "from_table",
    "tune",
]

_FILES = {
    "DataAudit": "oomproof.data.audit_record",
    "Stage": "oomproof.data.audit_record",
    "Stream": "oomproof.data.stream",
    "audit": "oomproof.data.auditing",
    "from_arrays": "oomproof.data.sources.arrays",
    "from_files": "oomproof.data.sources.images",
    "from_generator": "oomproof.data.sources.generators",
    "from_records": "oomproof.data.sources.tfrecords",
    "from_table": "oomproof.data.sources.tables",
    "tune": "oomproof.data.tuning",
}


def __getattr__(name: str) -> Any:
    if name in _FILES:
        return getattr(importlib.import_module(_FILES[name]), name)
    raise AttributeError(f"module 'oomproof.data' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
