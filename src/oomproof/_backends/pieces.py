"""A logical batch cut into pieces of nearly equal size.

Even pieces hold the least memory for a given number of pieces, and the last one is never a sliver.
"""

from __future__ import annotations

import itertools
import numbers


def checked_size(micro_batch_size: int | str) -> int | None:
    """The user's `micro_batch_size` as a number, `None` for `"auto"`."""
    if micro_batch_size == "auto":
        return None
    if isinstance(micro_batch_size, bool) or not isinstance(micro_batch_size, numbers.Integral):
        raise TypeError(
            f'Expected `micro_batch_size` to be "auto" or an int. Received: micro_batch_size={micro_batch_size!r}'
        )
    if micro_batch_size < 1:
        raise ValueError(f"Expected `micro_batch_size` to be at least 1. Received: micro_batch_size={micro_batch_size}")
    return int(micro_batch_size)


def piece_count(batch_size: int, micro_batch_size: int | None, *, few_numbers: bool = False) -> int:
    """The fewest pieces of which none holds more than `micro_batch_size` samples.

    With `few_numbers` of those numbers that `usual_count` knows.
    """
    if micro_batch_size is None or batch_size <= micro_batch_size:
        return 1
    pieces = -(-batch_size // micro_batch_size)
    return usual_count(batch_size, pieces) if few_numbers else pieces


def usual_count(batch_size: int, pieces: int) -> int:
    """The least number of pieces, not below this one, that is a power of two or leaves no smaller last piece.

    Where each number of pieces is a program of its own, programs are to be few, and one for a last piece is another.
    """
    power = min(batch_size, 1 << (pieces - 1).bit_length())
    return next((count for count in range(pieces, power) if batch_size % count == 0), power)


def largest_piece(batch_size: int, pieces: int) -> int:
    return -(-batch_size // pieces)


def piece_bounds(batch_size: int, pieces: int) -> list[tuple[int, int]]:
    """(start, stop) of each piece. Sizes differ by at most one and every sample is in exactly one piece.

    >>> piece_bounds(10, 3)
    [(0, 3), (3, 6), (6, 10)]
    """
    edges = [index * batch_size // pieces for index in range(pieces + 1)]
    return list(itertools.pairwise(edges))
