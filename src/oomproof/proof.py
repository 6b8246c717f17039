"""The proof that a step is the one that was asked for: what both write, compared.

The same samples go through one step, plain and as it is to be run, to new values of everything the step writes. How
much rounding a model has is measured on the model itself, by the plain step with its samples in another order.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

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
    found = []
    norms = {name: _norm(value) for name, value in asked.items() if name.startswith(GRADIENT) and value is not None}
    noise = min(_NOTHING * epsilon, _NOTHING_AT_MOST) * max(norms.values(), default=0.0)
    # Optimizers make whole steps of gradients that are nothing but rounding.
    idle = [name.removeprefix(GRADIENT) for name, norm in norms.items() if norm <= noise]
    for name in dict.fromkeys([*asked, *made]):
        if not name.startswith(GRADIENT) and any(_belongs(name, variable) for variable in idle):
            continue
        # What a step does not write stays as it was.
        old = before.get(name)
        one, other = asked.get(name, old), made.get(name, old)
        floor = noise if name.startswith(GRADIENT) else 0.0
        wrong = _disagreement(name, one, other, reordered.get(name, one), old, epsilon, floor)
        found += [] if wrong is None else [wrong]
    # Gradients first: what differs in them differs in all that follows from them.
    return tuple(sorted(found, key=lambda each: (not each.name.startswith(GRADIENT), -each.relative)))


def _belongs(name: str, variable: str) -> bool:
    """Whether a name is that of the variable itself, or of a slot that an optimizer keeps for it."""
    return name == variable or variable.replace("/", "_") in name


def _disagreement(
    name: str, asked: Any, made: Any, noise: Any, before: Any, epsilon: float, floor: float
) -> Disagreement | None:
    if asked is None or made is None:
        return None if asked is made else Disagreement(name, float("inf"), 0.0)
    if asked.shape != made.shape:
        return Disagreement(name, float("inf"), 0.0)
    if not np.issubdtype(asked.dtype, np.floating):
        return None if np.array_equal(asked, made) else Disagreement(name, float("inf"), 0.0)
    finite = np.isfinite(asked)
    if not np.array_equal(finite, np.isfinite(made)):
        return Disagreement(name, float("inf"), 0.0)
    if not finite.all():
        asked, made, noise, before = (_only(values, finite) for values in (asked, made, noise, before))
    distance, scale = _norm(made - asked), _norm(asked)
    allowed = floor + (_NOISE * _norm(noise - asked) if noise.shape == asked.shape else 0.0)
    if before is None or before.shape != asked.shape:
        allowed += tolerance(epsilon) * scale
    else:
        # The update is not linear: small differences of small gradients are differences of whole steps. And new values
        # are rounded as the variable is.
        moved = _norm(asked - before)
        allowed += 10 * tolerance(epsilon) * moved + 4 * float(np.finfo(asked.dtype).eps) * scale
        scale = moved or scale
    if distance <= allowed or distance == 0.0:
        return None
    scale = scale or 1.0
    return Disagreement(name, distance / scale, allowed / scale)


def _only(values: Any, finite: Any) -> Any:
    return None if values is None else values[finite] if values.shape == finite.shape else values


def _norm(values: Any) -> float:
    return float(np.sqrt(np.sum(np.square(values, dtype=np.float64))))


def spread(samples: int, wanted: int) -> list[int]:
    """So many samples from all over a batch: the first few may be of a kind."""
    if wanted >= samples:
        return list(range(samples))
    return [index * samples // wanted for index in range(wanted)]


def other_order(samples: int) -> list[int]:
    return [*range(1, samples), 0][::-1]


def summary(found: Iterable[Disagreement], most: int = 2) -> str:
    found = list(found)
    more = f" and {len(found) - most} more" if len(found) > most else ""
    return ", ".join(map(str, found[:most])) + more
