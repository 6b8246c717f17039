"""The proof that a step is the one that was asked for: what both write, compared.

The same samples go through one step, plain and as it is to be run, to new values of everything the step writes. How
much rounding a model has is measured on the model itself, by the plain step with its samples in another order.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

# New values, gradients and logs of one step, by name.
Values = Mapping[str, Any]

GRADIENT = "gradient of "
# Rounding differs from one order of the samples to the next. So much more than what was seen may be more of it.
_NOISE = 10.0
# What the order of samples does not show: kernels that round differently for other numbers of samples. Relative to the
# norm of a variable's gradient, by the machine epsilon of what the model computes in.
_COARSE = ((1e-12, 1e-9), (1e-5, 1e-4), (1e-3, 5e-3), (1.0, 3e-2))
# A gradient with less than this many times epsilon of the largest one's norm may be zero, but for rounding.
_NOTHING, _NOTHING_AT_MOST = 16.0, 1e-2
# How many numbers of a gradient rounding may turn around beyond those that are small: this share of all, for each
# relative difference that rounding may make. Where it may make much of a difference, it comes in jumps: a unit that
# works in the one order does not in the other. So there it is one at least.
_FLIPPED, _FLIPPED_AT_MOST, _MUCH = 0.01, 0.01, 0.01
# GPUs multiply float32 with the mantissa of TensorFloat-32.
TENSOR_FLOAT = 2.0**-11


@dataclasses.dataclass(frozen=True)
class Disagreement:
    """Something that differs by more than rounding.

    Attributes:
        name: Of the variable, gradient or log.
        relative: Norm of the difference, relative to the norm of what it should be, or of how far the step moved it.
        rounding: The largest such difference that would have counted as rounding.
    """

    name: str
    relative: float
    rounding: float

    def __str__(self) -> str:
        return f"{self.name} differs by {self.relative:.1e} (rounding explains {self.rounding:.0e})"


def tolerance(epsilon: float) -> float:
    """What counts as rounding whatever the order of samples shows, relative to a norm.

    Args:
        epsilon: Machine epsilon of the coarsest type that the model computes in.
    """
    return next(coarse for limit, coarse in _COARSE if epsilon <= limit)


def disagreements(
    asked: Values, made: Values, reordered: Values, before: Values, epsilon: float
) -> tuple[Disagreement, ...]:
    """What a step gives that it should not have given, the worst first.

    Args:
        asked: Outcome of the plain step.
        made: Outcome of the step in question.
        reordered: Outcome of the plain step with its samples in another order.
        before: Values that the step started from, where there are any.
        epsilon: As for `tolerance`.
    """
    gradients = {name: value for name, value in asked.items() if name.startswith(GRADIENT) and value is not None}
    norms = {name: _norm(_finite(value)) for name, value in gradients.items()}
    nothing = min(_NOTHING * epsilon, _NOTHING_AT_MOST) * max(norms.values(), default=0.0)
    rounding = {name: _rounding(gradient, reordered.get(name, gradient)) for name, gradient in gradients.items()}
    much = max((rounding[name] / norm for name, norm in norms.items() if norm > nothing), default=0.0)
    flipped = min(_FLIPPED_AT_MOST, _FLIPPED * much)
    unsure: dict[str, _Unsure] = {}
    found = []
    for name, gradient in gradients.items():
        other, allowed = made.get(name), nothing + rounding[name] + tolerance(epsilon) * norms[name]
        found.append(_disagreement(name, gradient, other, None, allowed))
        if other is not None and other.shape == gradient.shape:
            count = int(np.count_nonzero(gradient))
            each = np.inf if norms[name] <= nothing else allowed / max(1, count) ** 0.5
            small = (np.abs(gradient) <= each) & ((gradient != 0) | (other != 0))
            more = count * flipped
            unsure[name.removeprefix(GRADIENT)] = _Unsure(small, math.ceil(more) if much > _MUCH else int(more))
    for name in dict.fromkeys(name for name in [*asked, *made] if name not in gradients):
        # What a step does not write stays as it was.
        old = before.get(name)
        values = asked.get(name, old), made.get(name, old), reordered.get(name, asked.get(name, old)), old
        owner = unsure.get(_variable_of(name, unsure))
        if owner is not None and _shape(values[0]) == _shape(values[1]) == owner.small.shape:
            values = owner.without(*values)
        one, other, noise, old = values
        found.append(_disagreement(name, one, other, old, _allowed(one, noise, old, epsilon)))
    wrong = [each for each in found if each is not None]
    # Gradients first: what differs in them differs in all that follows from them.
    return tuple(sorted(wrong, key=lambda each: (not each.name.startswith(GRADIENT), -each.relative)))


class _Unsure(NamedTuple):
    """Numbers of a gradient whose sign is rounding. Optimizers make whole steps of them.

    Attributes:
        small: Which are known to be such, by their size.
        more: How many more there may be.
    """

    small: Any
    more: int

    def without(self, asked: Any, made: Any, *others: Any) -> tuple[Any, ...]:
        """What an optimizer made of the other numbers."""
        kept = ~self.small
        if 0 < self.more < np.count_nonzero(kept):
            with np.errstate(invalid="ignore"):
                distance = np.where(kept, np.nan_to_num(np.abs(made - asked)), -np.inf)
            kept &= distance <= np.partition(distance, -self.more - 1, axis=None)[-self.more - 1]
        return tuple(_only(values, kept) for values in (asked, made, *others))


def _variable_of(name: str, variables: Iterable[str]) -> str:
    """The variable that a name is of, or that an optimizer keeps it for; empty where there is none."""
    slot = name.rpartition("/")[2]
    owners = [v for v in variables if name == v or slot.startswith(f"{v.replace('/', '_')}_")]
    return max(owners, key=len, default="")


def _rounding(asked: Any, noise: Any) -> float:
    if _shape(noise) != asked.shape:
        return 0.0
    return _NOISE * _norm(_apart(noise, asked))


def _allowed(asked: Any, noise: Any, before: Any, epsilon: float) -> float:
    """How far something may be from what was asked for."""
    if asked is None or not np.issubdtype(asked.dtype, np.floating):
        return 0.0
    allowed = _rounding(asked, noise)
    if _shape(before) != asked.shape:
        return allowed + tolerance(epsilon) * _norm(_finite(asked))
    # The update is not linear: small differences of small gradients are differences of whole steps. And new values are
    # rounded as the variable is.
    moved, precision = _norm(_apart(asked, before)), float(np.finfo(asked.dtype).eps)
    return allowed + 10 * tolerance(epsilon) * moved + 4 * precision * _norm(_finite(asked))


def _disagreement(name: str, asked: Any, made: Any, before: Any, allowed: float) -> Disagreement | None:
    if asked is None or made is None:
        return None if asked is made else Disagreement(name, float("inf"), 0.0)
    if asked.shape != made.shape:
        return Disagreement(name, float("inf"), 0.0)
    if not np.issubdtype(asked.dtype, np.floating):
        return None if np.array_equal(asked, made) else Disagreement(name, float("inf"), 0.0)
    if not np.array_equal(np.isfinite(asked), np.isfinite(made)):
        return Disagreement(name, float("inf"), 0.0)
    distance = _norm(_apart(made, asked))
    if distance <= allowed or distance == 0.0:
        return None
    moved = _norm(_apart(asked, before)) if _shape(before) == asked.shape else 0.0
    scale = moved or _norm(_finite(asked)) or 1.0
    return Disagreement(name, distance / scale, allowed / scale)


def _apart(one: Any, other: Any) -> Any:
    """Differences of the numbers that are none of infinity."""
    finite = np.isfinite(one) & np.isfinite(other)
    return one - other if finite.all() else one[finite] - other[finite]


def _finite(values: Any) -> Any:
    finite = np.isfinite(values)
    return values if finite.all() else values[finite]


def _shape(values: Any) -> Any:
    return None if values is None else values.shape


def _only(values: Any, chosen: Any) -> Any:
    return values[chosen] if _shape(values) == chosen.shape else values


def _norm(values: Any) -> float:
    quick = float(np.linalg.norm(np.ravel(values)))
    # In single precision, squares of what is very large or small are none.
    return quick if 1e-15 < quick < 1e15 else float(np.sqrt(np.sum(np.square(values, dtype=np.float64))))


def spread(samples: int, wanted: int) -> list[int]:
    """So many samples from all over a batch: the first few may be of a kind."""
    if wanted >= samples:
        return list(range(samples))
    return [index * samples // wanted for index in range(wanted)]


def other_order(samples: int) -> list[int]:
    """Another one for two samples, too."""
    return list(range(samples))[::-1]


def summary(found: Iterable[Disagreement], most: int = 2) -> str:
    found = list(found)
    more = f" and {len(found) - most} more" if len(found) > most else ""
    return ", ".join(map(str, found[:most])) + more
