"""Faster kernels of the same arithmetic, in the place of those that Keras's functions come to call."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from oomproof._compat.torch import CROSS_ENTROPY, NLL_LOSS


@contextlib.contextmanager
def faster_kernels() -> Iterator[None]:
    """While it lasts, losses of classes at many positions are computed with the classes on the last axis.

    Keras moves them to the second one, where torch puts a softmax on few threads, each of which loops over all classes,
    after a copy of all logits.
    """
    with CROSS_ENTROPY.to(_classes_last), NLL_LOSS.to(_classes_last):
        yield


def _classes_last(plain: Callable[..., Any], values: Any, target: Any, *args: Any, **kwargs: Any) -> Any:
    # As Keras calls it, and no other way.
    if args or kwargs != {"reduction": "none"} or values.dim() < 3:
        return plain(values, target, *args, **kwargs)
    moved = values.movedim(1, -1)
    # What Keras has moved lies, moved back, as it did before.
    if target.shape != moved.shape[:-1] or not moved.is_contiguous():
        return plain(values, target, **kwargs)
    return plain(moved.flatten(0, -2), target.flatten(), reduction="none").view(target.shape)
