from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oomproof._records.units import DTYPE_BYTES, format_bytes, parse_budget, tensor_bytes

GIB = 2**30


@pytest.mark.parametrize(
    ("budget", "expected"),
    [
        (None, None),
        (1, 1),
        (GIB, GIB),
        ("1024", 1024),
        ("1024 B", 1024),
        ("500MB", 500_000_000),
        ("500 mb", 500_000_000),
        ("0.5GiB", GIB // 2),
        (" 8GiB ", 8 * GIB),
        ("90%", int(8 * GIB * 0.9)),
        ("100 %", 8 * GIB),
    ],
)
def test_good_budgets(budget: int | str | None, expected: int | None) -> None:
    assert parse_budget(budget, 8 * GIB) == expected


@pytest.mark.parametrize(
    ("budget", "message"),
    [
        ("8 bananas", "8 bananas"),
        ("", "Expected `budget` to be a size"),
        ("GiB", "Expected `budget` to be a size"),
        ("-1GiB", "Expected `budget` to be a size"),
        ("1e9", "Expected `budget` to be a size"),
        ("nan", "Expected `budget` to be a size"),
        (0, "positive"),
        ("0MB", "positive"),
        (-1, "positive"),
        (8 * GIB + 1, "at most the device's memory, 8.0 GiB"),
        ("9GiB", "at most the device's memory, 8.0 GiB"),
        ("150%", "between 0% and 100%"),
        ("0%", "between 0% and 100%"),
    ],
)
def test_bad_budgets_name_what_was_received(budget: int | str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as raised:
        parse_budget(budget, 8 * GIB)
    assert f"Received: budget={budget!r}" in str(raised.value)


@pytest.mark.parametrize("budget", [True, False, 0.5, 8e9, b"8GiB", ["8GiB"]])
def test_other_types_are_refused(budget: Any) -> None:
    with pytest.raises(TypeError, match="Expected `budget` to be an int of bytes"):
        parse_budget(budget, 8 * GIB)


def test_a_share_needs_a_device_that_tells_its_size() -> None:
    with pytest.raises(ValueError, match="of this device is unknown"):
        parse_budget("90%", None)


def test_without_a_known_device_any_size_goes() -> None:
    assert parse_budget("900TiB", None) == 900 * 2**40


@given(st.integers(1, 2**50), st.sampled_from(["B", "KB", "MB", "GB", "TB", "KiB", "MiB", "GiB", "TiB"]))
def test_whole_numbers_of_a_unit_are_exact(count: int, unit: str) -> None:
    count = count % 4096 + 1
    one = parse_budget(f"1{unit}", None)
    assert one is not None
    assert parse_budget(f"{count}{unit}", None) == count * one
    assert parse_budget(f"{count} {unit.lower()}", None) == count * one


@given(st.integers(1, 2**53))
def test_what_is_printed_can_be_read_back(size: int) -> None:
    back = parse_budget(format_bytes(size), None)
    assert back is not None
    # Two digits before the point and one after it, or three digits and more: at most 5 % off, at 1.0 of a unit.
    assert back == pytest.approx(size, rel=0.05)


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1536 * 2**20, "1.5 GiB"),
        (512 * 2**20, "512 MiB"),
        (-(3 * 2**30), "-3.0 GiB"),
        (2**41, "2.0 TiB"),
    ],
)
def test_format_bytes(size: int, text: str) -> None:
    assert format_bytes(size) == text


def test_tensor_bytes() -> None:
    assert tensor_bytes((256, 32, 32, 3), "float32") == 256 * 32 * 32 * 3 * 4
    assert tensor_bytes((), "float64") == 8
    assert tensor_bytes((0, 5), "int32") == 0
    assert tensor_bytes((3,), "string") == 24
    assert set(DTYPE_BYTES.values()) <= {1, 2, 4, 8, 16}
