"""Bytes to text and back, and the only table of dtype sizes."""

from __future__ import annotations

import math
import re

_BINARY = {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
_DECIMAL = {"b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_UNITS = _BINARY | _DECIMAL
_SIZE = re.compile(r"([0-9]*\.?[0-9]+)\s*([a-z]*)")
_PERCENT = re.compile(r"([0-9]*\.?[0-9]+)\s*%")

DTYPE_BYTES = {
    "bool": 1,
    "int8": 1,
    "uint8": 1,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int16": 2,
    "uint16": 2,
    "float16": 2,
    "bfloat16": 2,
    "int32": 4,
    "uint32": 4,
    "float32": 4,
    "int64": 8,
    "uint64": 8,
    "float64": 8,
    "complex64": 8,
    "complex128": 16,
}


def tensor_bytes(shape: tuple[int, ...], dtype: str) -> int:
    """Bytes of a dense tensor. Unknown dtypes (strings, variants) count as 8 bytes an element."""
    return math.prod(int(n) for n in shape) * DTYPE_BYTES.get(dtype, 8)


def format_bytes(size: float) -> str:
    """`1610612736` → `"1.5 GiB"`."""
    magnitude = abs(size)
    for name, factor in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if magnitude >= factor:
            scaled = size / factor
            return f"{scaled:.0f} {name}" if abs(scaled) >= 100 else f"{scaled:.1f} {name}"
    return f"{size:.0f} B"


def parse_budget(budget: int | str | None, device_bytes: int | None) -> int | None:
    """Turns a budget into bytes and checks it against the device.

    Args:
        budget: Bytes as an int, text such as `"8GiB"` or `"500MB"`, a share of the device such as `"90%"`,
            or `None` for whatever the device has.
        device_bytes: What the framework can use on the device, or `None` when that is unknown.

    Returns:
        The budget in bytes, or `None` when none was given.

    Raises:
        TypeError: For anything but an int, a string or `None`.
        ValueError: For text that is not a size, and a size that is not positive or larger than the device's.
    """
    if budget is None:
        return None
    if isinstance(budget, bool) or not isinstance(budget, int | str):
        raise TypeError(
            'Expected `budget` to be an int of bytes, a size such as "8GiB", a share such as "90%", or None. '
            f"Received: budget={budget!r} (of type {type(budget).__name__})"
        )
    size = budget if isinstance(budget, int) else _parse_size(budget, device_bytes)
    if size <= 0:
        raise ValueError(f"Expected `budget` to be positive. Received: budget={budget!r}")
    if device_bytes is not None and size > device_bytes:
        raise ValueError(
            f"Expected `budget` to be at most the device's memory, {format_bytes(device_bytes)}. "
            f"Received: budget={budget!r} ({format_bytes(size)}). "
            "Leave `budget` out to use all of it."
        )
    return size


def _parse_size(text: str, device_bytes: int | None) -> int:
    lowered = text.strip().lower()
    if share := _PERCENT.fullmatch(lowered):
        fraction = float(share[1]) / 100
        if not 0 < fraction <= 1:
            raise ValueError(f"Expected a share of the device between 0% and 100%. Received: budget={text!r}")
        if device_bytes is None:
            raise ValueError(
                f"A budget of {text!r} is a share of the device's memory, and the memory of this device is unknown. "
                'Pass a size instead, such as "8GiB".'
            )
        return int(device_bytes * fraction)
    size = _SIZE.fullmatch(lowered)
    unit = size[2] if size else ""
    if size is None or (unit or "b") not in _UNITS:
        raise ValueError(
            'Expected `budget` to be a size such as "8GiB", "500MB" or "90%". '
            f"Received: budget={text!r}. Units: B, KB, MB, GB, TB, KiB, MiB, GiB, TiB."
        )
    return int(float(size[1]) * _UNITS[unit or "b"])
