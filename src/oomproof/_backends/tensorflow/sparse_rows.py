"""How the rows of a sparse gradient go together from pieces.

Optimizers and clipping see the rows as they are, so pieces must give those that the whole batch would have had.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal

Join = Literal["apart", "shared", "merged", "mixed"]


def how_rows_join(one: Sequence[int], several: Sequence[int], twice: Sequence[int], sparse: bool) -> Join:
    """How the rows of one sparse gradient join.

    Args:
        one: Rows that the gradient of one sample has.
        several: Rows for several samples, that one first.
        twice: Rows for that one sample two times.
        sparse: Whether inputs are sparse, so that a few samples may well use the same rows by chance.

    Returns:
        `"apart"` where each sample has rows of its own, `"shared"` where all samples have the same ones, `"merged"`
        where each row comes once however often it is used, and `"mixed"` for anything else.
    """
    one, several, twice = list(one), list(several), list(twice)
    if len(twice) == 2 * len(one):
        return "apart"
    if len(twice) != len(one):
        return "mixed"
    distinct = all(len(set(rows)) == len(rows) for rows in (one, several))
    if one == several and not (sparse and distinct):
        return "shared"
    return "merged" if distinct else "mixed"


def clips(optimizer: Any) -> bool:
    """Whether an optimizer, or the one it wraps, clips gradients."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    return any(getattr(inner, name, None) is not None for name in ("clipnorm", "global_clipnorm", "clipvalue"))


def mixed_rows_caveat(names: Iterable[str]) -> tuple[str, ...]:
    """What to say of weights whose gradients have rows of samples beside rows that samples share; empty without any."""
    listed = ", ".join(names)
    if not listed:
        return ()
    return (f"the gradient of {listed} has rows that samples share beside rows of their own, and clipping sees them",)
