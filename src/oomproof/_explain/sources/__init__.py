"""Patterns, one file per source. What stands first wins, so what is harmless or no memory failure comes first."""

from __future__ import annotations

from oomproof._explain.pattern import Pattern
from oomproof._explain.sources import dataloader, host, kernel, libraries, not_memory, tensorflow, torch, xla

_ALL: tuple[Pattern, ...] = (
    *not_memory.HARMLESS,
    *dataloader.PATTERNS,
    *not_memory.PATTERNS,
    *tensorflow.PATTERNS,
    *xla.PATTERNS,
    *torch.PATTERNS,
    *libraries.PATTERNS,
    *host.PATTERNS,
    *kernel.PATTERNS,
    *host.LAST,
    *not_memory.LAST,
)

# What a line is, by the first that matches; and what lines say besides, by all that match.
MEANINGS = tuple(pattern for pattern in _ALL if pattern.kind != "detail")
DETAILS = tuple(pattern for pattern in _ALL if pattern.kind == "detail")
PATTERNS = MEANINGS + DETAILS
