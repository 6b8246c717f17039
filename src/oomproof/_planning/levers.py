"""What a plan may change about a training, by the names that `allow` takes."""

from __future__ import annotations

from collections.abc import Iterable

LEVERS = ("microbatch", "recompute", "head", "xla", "mixed_precision", "batch_statistics")
_EXACT = frozenset({"microbatch", "recompute", "head", "xla"})
_WORDS = {"exact": _EXACT, "default": _EXACT | {"batch_statistics"}}


def allowed(allow: str | Iterable[str]) -> frozenset[str]:
    """The levers that `allow` names."""
    if isinstance(allow, str) and allow in _WORDS:
        return _WORDS[allow]
    if isinstance(allow, set | frozenset | list | tuple) and set(allow) <= set(LEVERS):
        return frozenset(allow)
    raise ValueError(
        f'Expected `allow` to be "default", "exact" or a set of {sorted(LEVERS)}. Received: allow={allow!r}'
    )


def as_set(levers: Iterable[str]) -> str:
    """As `allow` takes them: `"{'microbatch', 'xla'}"`."""
    return "{" + ", ".join(repr(lever) for lever in sorted(levers)) + "}"
