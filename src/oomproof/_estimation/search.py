"""The largest batch that fits, in few looks: what a batch needs grows nearly in a straight line."""

from __future__ import annotations

from collections.abc import Callable

_FIRST = 16
_MOST = 2**24


def largest(need: Callable[[int], int], limit: int, one: int) -> int:
    """The largest batch whose need is at most the limit, to one percent.

    Args:
        need: Bytes for a batch of that size. Each call is slow.
        limit: Bytes there are.
        one: Bytes for a batch of one sample, which fits.
    """
    known = {1: one}
    fits, fails = 1, _MOST
    guess, turn = _FIRST, 0
    while fails - fits > _step(fits):
        known[guess] = need(guess)
        if known[guess] <= limit:
            fits = guess
        else:
            fails = guess
        turn += 1
        line = _on_the_line(known, limit)
        if line - fits <= _step(fits):
            # The line says that this is it: looking one step further settles it.
            line = fits + _step(fits)
        # Every third look halves what is open, for needs that are no line.
        guess = line if turn % 3 or fails == _MOST else (fits + fails) // 2
        guess = min(max(guess, fits + 1), fails - 1)
    return fits


def _step(size: int) -> int:
    return max(1, size // 100)


def _on_the_line(known: dict[int, int], limit: int) -> int:
    """Where the line through the two points nearest to the limit reaches it."""
    (a, need_a), (b, need_b) = sorted(known.items(), key=lambda point: abs(point[1] - limit))[:2]
    if need_a == need_b:
        return 2 * max(a, b)
    return int(a + (limit - need_a) * (b - a) / (need_b - need_a))
