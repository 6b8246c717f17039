"""The proof that a step is the one that was asked for: what both write, compared.

The same samples go through one step, plain and as it is to be run, to new values of everything the step writes. How
much rounding a model has is measured on the model itself, by the plain step with its samples in another order, and with
weights that are off by their last bit.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

# New values, gradients and logs of one step, by name.
Values = Mapping[str, Any]

GRADIENT = "gradient of "
# Rounding differs from one order of the samples to the next. So much more than what was seen may be more of it.
_NOISE = 10.0
# Of what weights that are rounded show, less is left out.
_ALL_KINDS = 3.0
# And where it differs by so many times what weights show that are rounded, it is not rounding.
_ALIKE = 10.0
# What the order of samples does not show: kernels that round differently for other numbers of samples. Relative to the
# norm of a variable's gradient, by the machine epsilon of what the model computes in.
_COARSE = ((1e-12, 1e-9), (1e-5, 1e-4), (1e-3, 5e-3), (1.0, 3e-2))
# A gradient with less than this many times epsilon of the largest one's norm may be zero, but for rounding.
_NOTHING, _NOTHING_AT_MOST = 16.0, 1e-2
# A number of a gradient differs where it does so by more than this many times what the whole one does and rounding may.
_DIFFERS = 3.0
# What an optimizer keeps has a share in its step: of the others, at most these may be near a sign's change.
_JUMPS_AT_MOST = 0.002
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
    asked: Values,
    made: Values,
    others: Sequence[Values],
    before: Values,
    epsilon: float,
    owners: Mapping[str, str] | None = None,
) -> tuple[Disagreement, ...]:
    """What a step gives that it should not have given, the worst first.

    Args:
        asked: Outcome of the plain step.
        made: Outcome of the step in question.
        others: Outcomes of plain steps that differ from the first by rounding alone.
        before: Values that the step started from, where there are any.
        epsilon: As for `tolerance`.
        owners: The variable that each of an optimizer's is kept for, where that is known; otherwise names tell.
    """
    gradients = {name: value for name, value in asked.items() if name.startswith(GRADIENT) and value is not None}
    norms = {name: _norm(_finite(value)) for name, value in gradients.items()}
    nothing = min(_NOTHING * epsilon, _NOTHING_AT_MOST) * max(norms.values(), default=0.0)
    # Clipping by the norm of all gradients makes a difference in one of them one in all.
    everywhere = max((_distance(gradients, norms, outcome) for outcome in (made, *others)), default=0.0)
    unsure: dict[str, _Unsure] = {}
    found = []
    for name, gradient in gradients.items():
        other, seen = made.get(name), [outcome[name] for outcome in others if name in outcome]
        allowed = nothing + _rounding(gradient, seen) + tolerance(epsilon) * norms[name]
        found.append(_disagreement(name, gradient, other, None, allowed))
        like = [values for values in (other, *seen) if _shape(values) == gradient.shape]
        unsure[name.removeprefix(GRADIENT)] = _unsure(gradient, like, norms[name] <= nothing, everywhere, epsilon)
    for name in dict.fromkeys(name for name in [*asked, *made] if name not in gradients):
        # What a step does not write stays as it was.
        old = before.get(name)
        one, other = asked.get(name, old), made.get(name, old)
        noise = [outcome[name] for outcome in others if name in outcome]
        owner = unsure.get((owners or {}).get(name) or _variable_of(name, unsure))
        if owner is not None and _shape(one) == _shape(other) == owner.differs.shape:
            one, other, old, *noise = owner.without(one, other, old, *noise)
        elif owner is not None and owner.nothing and _shape(one) == _shape(other):
            continue
        apart = 0.0 if owner is None else owner.apart
        found.append(_disagreement(name, one, other, old, _allowed(one, noise, old, epsilon, apart)))
    wrong = [each for each in found if each is not None]
    # Gradients first: what differs in them differs in all that follows from them.
    return tuple(sorted(wrong, key=lambda each: (not each.name.startswith(GRADIENT), -each.relative)))


class _Unsure(NamedTuple):
    """What an optimizer makes of a gradient shows nothing where gradients differ: it may make whole steps of rounding.

    Attributes:
        differs: Which numbers differ by so much, relative to themselves, that the optimizer's may be any.
        more: How many others there may be, whose step depends on more than the gradient.
        apart: How far the gradients are apart as a whole, relative to their norm.
        nothing: Whether it may be zero but for rounding.
    """

    differs: Any
    more: int
    apart: float
    nothing: bool

    def without(self, asked: Any, made: Any, *others: Any) -> tuple[Any, ...]:
        """What an optimizer made of the other numbers."""
        kept = ~self.differs
        if 0 < self.more < np.count_nonzero(kept):
            with np.errstate(invalid="ignore"):
                distance = np.where(kept, np.nan_to_num(np.abs(made - asked)), -np.inf)
            kept &= distance <= np.partition(distance, -self.more - 1, axis=None)[-self.more - 1]
        return tuple(_only(values, kept) for values in (asked, made, *others))


def _unsure(gradient: Any, others: list[Any], nothing: bool, everywhere: float, epsilon: float) -> _Unsure:
    norm = _norm(_finite(gradient))
    apart = max([everywhere, *(_norm(_apart(other, gradient)) / norm for other in others if norm)])
    each = _DIFFERS * (tolerance(epsilon) + apart)
    if nothing:
        each = 0.0
    differs = np.zeros(gradient.shape, bool)
    for other in others:
        with np.errstate(invalid="ignore", over="ignore"):
            differs |= np.abs(other - gradient) > each * np.abs(gradient)
    return _Unsure(differs, int(gradient.size * min(_JUMPS_AT_MOST, apart)), apart, nothing and bool(differs.any()))


def _distance(gradients: Values, norms: Mapping[str, float], outcome: Values) -> float:
    """How far all gradients together are from others, relative to their norm."""
    like = [name for name, gradient in gradients.items() if _shape(outcome.get(name)) == gradient.shape]
    apart = math.hypot(*(_norm(_apart(outcome[name], gradients[name])) for name in like))
    return apart / (math.hypot(*norms.values()) or 1.0)


def _variable_of(name: str, variables: Iterable[str]) -> str:
    """The variable that a name is of, or that an optimizer keeps it for; empty where there is none."""
    slot = name.rpartition("/")[2]
    owners = [v for v in variables if name == v or slot.startswith(f"{v.replace('/', '_')}_")]
    return max(owners, key=len, default="")


def _rounding(asked: Any, others: Iterable[Any]) -> float:
    return _NOISE * max((_norm(_apart(other, asked)) for other in others if _shape(other) == asked.shape), default=0.0)


def _allowed(asked: Any, others: Iterable[Any], before: Any, epsilon: float, apart: float) -> float:
    """How far something may be from what was asked for, if the gradients it was made of are so far apart."""
    if asked is None or not np.issubdtype(asked.dtype, np.floating):
        return 0.0
    allowed = _rounding(asked, others)
    if _shape(before) != asked.shape:
        return allowed + tolerance(epsilon) * _norm(_finite(asked))
    # The update is not linear: squares of gradients are twice as far apart. And new values are rounded as the variable
    # is.
    moved, precision = _norm(_apart(asked, before)), float(np.finfo(asked.dtype).eps)
    return allowed + (10 * tolerance(epsilon) + 2 * apart) * moved + 4 * precision * _norm(_finite(asked))


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


def is_rounding(asked: Values, reordered: Values, shaken: Values, epsilon: float) -> bool:
    """Whether no more than rounding made another order of the samples give another outcome.

    Not for a model that compares each sample with the next one: it gives another outcome in another order, too.
    """

    def apart(outcome: Values, kind: str) -> float:
        these = {name: value for name, value in asked.items() if name.startswith(kind) and value is not None}
        return _distance(these, {name: _norm(_finite(value)) for name, value in these.items()}, outcome)

    return all(
        apart(reordered, kind) <= _ALIKE * apart(shaken, kind) + tolerance(epsilon) for kind in (GRADIENT, "log loss")
    )


def nearer(asked: Values, other: Values) -> Values:
    """Another outcome, brought so near that it counts for three times what it shows: it shows all kinds of rounding."""

    def between(one: Any, value: Any) -> Any:
        if _shape(value) != _shape(one) or value is None or not np.issubdtype(value.dtype, np.floating):
            return value
        with np.errstate(invalid="ignore", over="ignore"):
            return one + (value - one) * np.asarray(_ALL_KINDS / _NOISE, value.dtype)

    return {name: between(asked.get(name), value) for name, value in other.items()}


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
