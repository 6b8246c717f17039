"""Python's collector of cycles, switched off while a step is traced.

Tracing makes hundreds of thousands of objects that stay, and the collector would go through them again and again.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def collector_off() -> Iterator[None]:
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
