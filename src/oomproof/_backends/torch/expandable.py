"""Segments that grow: torch's allocator takes memory page by page, so that what is free between blocks is of use.

As torch comes, it takes memory in segments that never change, and a step may run out below its limit. Other programs
that fill cards switch this on, too. What a user has said about it in the environment stands.
"""

from __future__ import annotations

import functools
import logging
import os
import platform
import sys

import torch

from oomproof._compat.torch import get_device, set_allocator

logger = logging.getLogger("oomproof")

# Pages of large blocks are so large, and at the ends of what is in use some are used in part.
IN_PART = 2 * 20 * 2**20
_NAME = "expandable_segments"
_refused: list[str] = []
_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")


def grow() -> bool:
    """Whether segments grow while a guarded model trains on a GPU."""
    said = _said().lower().replace(" ", "")
    if _NAME in said:
        return f"{_NAME}:true" in said
    # An allocator of somebody else has no segments.
    return can_grow() and "backend:" not in said.replace("backend:native", "")


def can_grow() -> bool:
    """Whether torch can do it here. Drivers of Windows have no pages."""
    windows = sys.platform != "linux" or "microsoft" in platform.release().lower()
    return not _refused and torch.version.hip is None and not windows


def let_grow() -> None:
    """Sees to it that segments made from here on can grow. What is there already stays as it is."""
    if torch.device(get_device()).type == "cuda" and grow() and _NAME not in _said():
        _switch_on()


@functools.cache
def _switch_on() -> None:
    # torch forgets what it was told before, so that is said again.
    settings = ",".join(part for part in (_said(), f"{_NAME}:True") if part)
    try:
        set_allocator(settings)
    except Exception as error:
        _refused.append(str(error))
        logger.info(f"oomproof: torch's segments stay as they are ({type(error).__name__}: {error})")


def _said() -> str:
    return ",".join(os.environ[name] for name in _SETTINGS if os.environ.get(name))
