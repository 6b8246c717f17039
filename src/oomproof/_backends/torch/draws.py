"""Random numbers of pieces on torch: others than those of the whole batch.

Its generators cannot be moved to where a row begins: on CPUs they are Mersenne twisters, and on GPUs the numbers depend
on how a kernel is laid out over the card. So each piece draws from a seed of its own.
"""

from __future__ import annotations

from typing import Any

import torch

from oomproof._backends.common.drawing import Function
from oomproof._backends.common.draws import Shape
from oomproof._compat.torch import keras_random

_SPREAD = 0x9E3779B1


class TorchRandom:
    """See `common.drawing.RandomFunctions`."""

    module = keras_random
    seed_function = "draw_seed"
    by_rows: frozenset[str] = frozenset()
    # The seed is all that changes, and torch.compile leaves its function alone.
    replaced: tuple[str, ...] = ()

    def shape(self, shape: Any) -> Shape:
        return tuple(int(size) for size in shape)

    def apart(self, seed: Any, start: Any) -> Any:
        return seed + torch.tensor([start * _SPREAD % 2**31, 0], dtype=seed.dtype, device=seed.device)

    def rows(self, function: str, plain: Function, arguments: dict[str, Any], first: Any, total: Any) -> Any:
        raise AssertionError("On torch no function gives some rows alone: `by_rows` is empty.")
