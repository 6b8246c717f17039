"""How a batch is cut: every sample in exactly one piece, no piece too large, no sliver at the end."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oomproof._backends.pieces import largest_piece, piece_bounds, piece_count


@given(batch=st.integers(1, 5000), micro=st.integers(1, 6000))
def test_pieces_cover_the_batch_and_keep_to_the_limit(batch, micro):
    pieces = piece_count(batch, micro)
    bounds = piece_bounds(batch, pieces)
    sizes = [stop - start for start, stop in bounds]
    assert [sample for start, stop in bounds for sample in range(start, stop)] == list(range(batch))
    assert max(sizes) == largest_piece(batch, pieces) <= micro
    assert max(sizes) - min(sizes) <= 1


@given(batch=st.integers(1, 5000), micro=st.integers(1, 6000))
def test_there_are_no_more_pieces_than_needed(batch, micro):
    pieces = piece_count(batch, micro)
    assert pieces == 1 or largest_piece(batch, pieces - 1) > micro


@pytest.mark.parametrize(
    ("batch", "micro", "pieces"),
    [(10, None, 1), (10, 10, 1), (10, 99, 1), (10, 9, 2), (10, 1, 10), (1, 1, 1), (0, 4, 1)],
)
def test_piece_count(batch, micro, pieces):
    assert piece_count(batch, micro) == pieces
