"""A pattern is data: what a line looks like, what it means, and an example that a test holds it to.

Named groups say what is read from a line: `size` (with a unit), `bytes`, `shape`, `dtype`, `op`, `layer`, and any of
`NUMBERS` (sizes with a unit). Sizes in all these texts are binary, whatever they are called.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from typing import Any, Literal

# failure: memory ran out. hidden: it did, and something else is said. soft: a line that is often harmless but explains
# a failure that follows. other: failed, and not for memory. harmless: reads like a failure and is none. detail: says
# more about the failure beside it.
Kind = Literal["failure", "hidden", "soft", "other", "harmless", "detail"]

NUMBERS = (
    "free",
    "total",
    "allocated",
    "reserved",
    "unallocated",
    "limit",
    "in_use",
    "region",
    "largest_free",
    "this_process",
    "other_process",
    "rss",
    "capacity",
    "piece",
)
_WEIGHTS = {"failure": 3.0, "other": 3.0, "hidden": 2.6, "soft": 1.5, "detail": 0.0, "harmless": 0.0}
_SIZE = re.compile(r"([0-9][0-9,]*\.?[0-9]*|\.[0-9]+)\s*(?:([kmgtp])i?b?|b|bytes)?", re.IGNORECASE)
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4, "p": 5}
# TensorFlow, XLA and others have names of their own.
_DTYPES = {
    "float": "float32",
    "double": "float64",
    "half": "float16",
    "f16": "float16",
    "f32": "float32",
    "f64": "float64",
    "bf16": "bfloat16",
    "pred": "bool",
    "s8": "int8",
    "s16": "int16",
    "s32": "int32",
    "s64": "int64",
    "u8": "uint8",
    "u16": "uint16",
    "u32": "uint32",
    "u64": "uint64",
    "c64": "complex64",
    "c128": "complex128",
    "<f4": "float32",
    "<f8": "float64",
    "<i8": "int64",
}


@dataclasses.dataclass(frozen=True)
class Pattern:
    """What a line looks like and what it means.

    Attributes:
        name: Its name, unique.
        kind: What such a line is.
        keyword: Text, in small letters, that every such line holds, or several, with "|" between them, of which it
            holds one. Lines without any keyword are not looked at twice. A keyword with capital letters is looked
            for as it is: "error" is in every line that shows a mean squared error, "Error" is not.
        regex: What is searched for, whatever the case of its letters.
        example: A line that it matches.
        raised_by: Who wrote it.
        memory: Which memory it is about.
        cause: The cause it means, where it means one by itself.
        sure: How sure that is.
        weight: How much it counts beside others; by default what its kind counts.
        topic: What the fixes are looked up by, where the cause is not enough.
    """

    name: str
    kind: Kind
    keyword: str
    regex: str
    example: str
    raised_by: str = "other"
    memory: str = "device"
    cause: str | None = None
    sure: float = 0.9
    weight: float | None = None
    topic: str = ""

    @property
    def counts(self) -> float:
        return _WEIGHTS[self.kind] if self.weight is None else self.weight

    @functools.cached_property
    def compiled(self) -> re.Pattern[str]:
        return re.compile(self.regex, re.IGNORECASE)

    @functools.cached_property
    def keywords(self) -> tuple[str, ...]:
        return tuple(self.keyword.lower().split("|"))

    def may_match(self, lowered: str) -> bool:
        """Whether a line in small letters holds a keyword."""
        for keyword in self.keywords:  # noqa: SIM110  (a generator takes four times as long, for every line)
            if keyword in lowered:
                return True
        return False

    def search(self, line: str) -> dict[str, Any] | None:
        """What the line says, or `None` if it is not such a line."""
        found = self.compiled.search(line)
        if found is None:
            return None
        return {name: _value(name, text) for name, text in found.groupdict().items() if text is not None}


def _value(name: str, text: str) -> Any:
    if name == "size" or name in NUMBERS:
        return parse_size(text)
    if name == "bytes":
        return int(text.replace(",", "")[:24])
    if name == "pid":
        return int(text[:12])
    if name in ("shape", "buffer_shape"):
        sizes = [size.strip() for size in text.strip(", ").split(",") if size.strip()]
        return tuple(int(size[:18]) for size in sizes[:32]) if all(size.isdecimal() for size in sizes) else None
    if name in ("dtype", "buffer_dtype", "node_dtype"):
        return _DTYPES.get(text.lower(), text.lower())
    return text


def parse_size(text: str) -> int | None:
    """`"17.2G"`, `"2.00 GiB"`, `"512 kB"` → bytes. Binary, since that is what allocators mean by all of these."""
    found = _SIZE.match(text.strip())
    if found is None:
        return None
    try:
        return int(float(found[1].replace(",", "")[:24]) * 1024 ** _POWERS[(found[2] or "").lower()])
    except ValueError:
        return None
