"""The exact share of a piece in the loss of its batch.

A Keras loss divides a sum S by a normaliser W: the number of elements, of valid elements under a mask, or the
sum of weights. Over pieces the loss of the batch is Σ Sᵢ / Σ Wᵢ. So while a piece is traced, the reduction that
all Keras losses share is replaced by one that divides the piece's S by the W of the whole batch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

from keras import ops

from oomproof._compat.keras import LOSS_REDUCTION, squeeze_or_expand_to_same_rank


class UncountedNormaliserError(Exception):
    """A mask came up where none was expected: the normalisers of the batch have to be counted first."""


class Reductions:
    """Stands in for Keras's loss reduction while one piece is traced.

    Args:
        totals: Normaliser of the whole batch per loss, for those that need one, or `None` while they are being
            counted.
        share: Samples of the piece / samples of the batch.

    Attributes:
        values: Per loss, in the order Keras computes them, the piece's share of its value.
        normalisers: Per loss, the piece's normaliser, where it does not follow from the number of samples.
    """

    def __init__(self, totals: Sequence[Any] | None, share: Any) -> None:
        self._totals = totals
        self._share = share
        self.values: list[Any] = []
        self.normalisers: list[Any] = []

    def reduce(
        self,
        values: Any,
        sample_weight: Any = None,
        mask: Any = None,
        reduction: str = "sum_over_batch_size",
        dtype: Any = None,
    ) -> Any:
        values = ops.convert_to_tensor(values, dtype=dtype)
        total_elements = valid = None
        if mask is not None:
            mask = ops.cast(ops.convert_to_tensor(mask), values.dtype)
            total_elements, valid = _count(mask, values.dtype), ops.sum(mask)
        weight = _weight(sample_weight, mask, values.dtype)
        if weight is not None:
            values, weight = squeeze_or_expand_to_same_rank(values, weight)
            values = values * weight
        total = ops.sum(values)
        if reduction == "sum":
            value = total
        elif reduction == "mean_with_sample_weight" and weight is not None:
            value = self._divide(total, ops.sum(weight))
        elif valid is not None:
            # Keras divides by the elements of the loss, scaled by valid / all elements of the mask.
            value = self._divide(total, valid * (_count(values, values.dtype) / total_elements))
        else:
            # As many elements for every sample: the whole batch has count / share of them.
            value = ops.divide_no_nan(times(total, self._share), _count(values, values.dtype))
        self.values.append(value)
        return value

    def _divide(self, total: Any, normaliser: Any) -> Any:
        index = len(self.normalisers)
        self.normalisers.append(normaliser)
        if self._totals is None:
            return total
        if index >= len(self._totals):
            raise UncountedNormaliserError
        return ops.divide_no_nan(total, self._totals[index])


def times(value: Any, share: Any) -> Any:
    """A tensor times a share. Where that is a plain number, Keras's own cast would take it through float32."""
    return value * (share if isinstance(share, float) else ops.cast(share, value.dtype))


def _weight(sample_weight: Any, mask: Any, dtype: Any) -> Any:
    if sample_weight is None:
        return mask
    sample_weight = ops.cast(ops.convert_to_tensor(sample_weight), dtype)
    if mask is None:
        return sample_weight
    mask, sample_weight = squeeze_or_expand_to_same_rank(mask, sample_weight)
    return sample_weight * mask


def _count(values: Any, dtype: Any) -> Any:
    return ops.cast(ops.prod(ops.convert_to_tensor(ops.shape(values), dtype="int32")), dtype)


def replaced_by(reductions: Reductions) -> contextlib.AbstractContextManager[None]:
    """Puts a `Reductions` in the place of Keras's reduction, in this thread."""
    return LOSS_REDUCTION.to(lambda _, *args, **kwargs: reductions.reduce(*args, **kwargs))


# How a loss given to `add_loss` goes together from pieces, where it is neither "mean" nor "sum", or may be both.
NEITHER, UNDECIDED = "neither", "undecided"


def added_loss_splits_as(whole: float, parts: Sequence[float], shares: Sequence[float]) -> str:
    """How a loss given to `add_loss` behaves when a batch is cut.

    Args:
        whole: Its value for some samples.
        parts: Its values for the pieces they are cut into.
        shares: Of the samples that each piece has.

    Returns:
        `"mean"` when the whole is the mean of the pieces, weighted by their samples, `"sum"` when it is their sum,
        `NEITHER`, or `UNDECIDED` where it looks like both, as zeros do.
    """
    rounding = 1e-4 * max(abs(whole), *map(abs, parts), 1e-12)
    mean = abs(whole - sum(part * share for part, share in zip(parts, shares, strict=True))) <= rounding
    total = abs(whole - sum(parts)) <= rounding
    if mean and total:
        return UNDECIDED
    return "mean" if mean else "sum" if total else NEITHER
