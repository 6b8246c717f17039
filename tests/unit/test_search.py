"""The search for the largest batch, against needs whose answer is known."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oomproof._estimation.search import largest


def looked(need, limit):
    calls = []

    def slow(size):
        calls.append(size)
        return need(size)

    return largest(slow, limit, need(1)), len(calls)


@pytest.mark.parametrize("answer", [1, 2, 3, 15, 16, 17, 100, 1000, 123_456])
def test_a_straight_line_takes_few_looks(answer):
    found, looks = looked(lambda size: 1000 + 70 * size, 1000 + 70 * answer + 35)
    assert answer - max(1, answer // 100) < found <= answer
    assert looks <= 6


def test_steps_as_allocators_make_them():
    found, looks = looked(lambda size: 5000 + 100 * (size // 8) * 8, 105_000)
    assert 990 <= found <= 1007
    assert looks <= 12


def test_needs_that_do_not_grow_end():
    found, _ = looked(lambda size: 10, 20)
    assert found >= 2**23


@given(st.integers(1, 10**9), st.integers(1, 10**6), st.floats(1.0, 1.2), st.integers(1, 5000), st.integers(0, 10**6))
def test_what_is_found_fits_and_a_percent_more_does_not(base, slope, bend, answer, jitter):
    def need(size):
        return int(base + slope * size**bend) + (jitter * size) // (size + 7)

    limit = need(answer)
    found, looks = looked(need, limit)
    assert need(found) <= limit
    assert found >= answer - max(1, answer // 100)
    assert looks <= 40
