"""The largest batch that fits, by doubling and halving the gap."""

from __future__ import annotations

RESOLUTION = 0.02


def next_batch(fits: list[int], fails: list[int], start: int) -> int | None:
    """The batch size to try next.

    Args:
        fits: Sizes that went through.
        fails: Sizes that ran out of memory.
        start: The size to begin with.

    Returns:
        A size between the largest that fits and the smallest that does not, or `None` when they are close enough.
    """
    low, high = max(fits, default=0), min(fails, default=None)
    if high is None:
        return 2 * low or start
    if high - low <= max(1, RESOLUTION * high):
        return None
    return (low + high) // 2


def bracket(fits: list[int], fails: list[int]) -> tuple[int, int] | None:
    """(largest that fits, smallest that does not), or `None` while the search is not at its end."""
    if not fails or next_batch(fits, fails, 1) is not None:
        return None
    return max(fits, default=0), min(fails)
