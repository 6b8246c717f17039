"""The dump that TensorFlow's and XLA's allocator writes when it runs out.

It always advises against fragmentation, so the advice means nothing. What does: how much is free in all, and how large
the largest free piece is.
"""

from __future__ import annotations

import re

from oomproof._explain.pattern import parse_size

_SIZE = r"\d[\d.]*\s?(?:[KMGTP]?i?B)?"
_FREE = re.compile(r"Free\s+at (?:0x)?[0-9a-f]+ of size (\d+)")
_POOL = re.compile(
    rf"(?:total_region_allocated_bytes_|Total (?:size|bytes) in pool): ({_SIZE}) memory_limit_: ({_SIZE})"
    rf"(?: available (?:size|bytes): ({_SIZE}))?"
)
_IN_USE = re.compile(rf"Sum Total of in-use chunks: ({_SIZE})")
_STATS = re.compile(rf"\b(Limit|InUse|LargestFreeBlock): {{2,}}({_SIZE})\s*$")
_NAMES = {"Limit": "limit", "InUse": "in_use"}


class Dump:
    """What was read of a dump so far."""

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}
        self._free = 0

    def read(self, line: str) -> bool:
        """Whether the line said something."""
        if "of size" in line:
            if found := _FREE.search(line):
                size = int(found[1][:24])
                self._free += size
                self.numbers["free"] = self._free
                self.numbers["largest_free"] = max(self.numbers.get("largest_free", 0), size)
            return found is not None
        if found := _STATS.search(line):
            if found[1] in _NAMES and (stated := parse_size(found[2])) is not None:
                self.numbers[_NAMES[found[1]]] = stated
            return True
        if found := _POOL.search(line):
            for name, text in zip(("region", "limit"), found.groups()[:2], strict=True):
                if (stated := parse_size(text)) is not None:
                    self.numbers[name] = stated
            return True
        if found := _IN_USE.search(line):
            if (stated := parse_size(found[1])) is not None:
                self.numbers.setdefault("in_use", stated)
            return True
        return False
