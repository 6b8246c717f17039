"""Predictions of pieces: as flat lists of tensors, and what of the whole batch's belongs to which piece."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from keras import tree

from oomproof._backends.common.engine import Engine
from oomproof._backends.pieces import piece_bounds
from oomproof._compat.keras import get_keras_mask, set_keras_mask
from oomproof.errors import UnsupportedModelError

_WHAT_TO_DO = """\
So the outputs of pieces, one behind the other, are not the output of the batch, and a batch of this model cannot be \
cut. Give every output a row for each sample, or as many rows for every sample, with those of the first sample first; \
or lower the batch size."""
_UNLIKE = "An output of the model has other numbers of rows for some samples than for others. " + _WHAT_TO_DO


class Predictions:
    """Predictions as a flat list of tensors, masks included, and back. A `None` among them stays where it is."""

    def __init__(self) -> None:
        self._structure: Any = None
        # For each output whether it has a mask, or `None` where there is no tensor.
        self._masked: list[bool | None] = []

    @property
    def nested(self) -> bool:
        return bool(tree.is_nested(self._structure))

    @property
    def count(self) -> int:
        return sum(1 + masked for masked in self._masked if masked is not None)

    def flat(self, y_pred: Any) -> list[Any]:
        rows = []
        self._structure = tree.map_structure(lambda leaf: 0, y_pred)
        self._masked = []
        for leaf in tree.flatten(y_pred):
            mask = None if leaf is None else get_keras_mask(leaf)
            self._masked.append(None if leaf is None else mask is not None)
            rows += [tensor for tensor in (leaf, mask) if tensor is not None]
        return rows

    def restored(self, rows: list[Any], masks: bool = True) -> Any:
        remaining = iter(rows)
        leaves = []
        for masked in self._masked:
            leaf = None if masked is None else next(remaining)
            mask = next(remaining) if masked else None
            if mask is not None and masks:
                set_keras_mask(leaf, mask)
            leaves.append(leaf)
        return tree.pack_sequence_as(self._structure, leaves)


def insist(number: int, wanted: int, otherwise: str) -> None:
    """What an engine does that knows every size."""
    if number != wanted:
        raise UnsupportedModelError(otherwise)


def check_rows(tensors: Sequence[Any], samples: Any) -> None:
    """Raises UnsupportedModelError for a tensor that has not as many rows for every sample, where that is known."""
    for index, tensor in enumerate(tensors):
        rows = tensor.shape[0] if len(tensor.shape) else 0
        if isinstance(rows, int) and isinstance(samples, int) and (rows == 0 or rows % samples):
            raise UnsupportedModelError(
                f"Output number {index + 1} of the model has {rows} rows for {samples} samples. {_WHAT_TO_DO}"
            )


def check_sizes(shapes: Sequence[Sequence[int]], others: Sequence[Sequence[int]]) -> None:
    """Raises UnsupportedModelError where what belongs to a sample has another size among other numbers of samples."""
    for index, (shape, other) in enumerate(zip(shapes, others, strict=True)):
        if list(shape[1:]) != list(other[1:]):
            raise UnsupportedModelError(
                f"Output number {index + 1} of the model is {_sized(shape)} for a few samples and {_sized(other)} for "
                "fewer: each row is about all samples of the batch, as in a matrix of similarities. A batch of this "
                "model cannot be cut. Return what each sample has of its own, and compare samples in the loss; or "
                "lower the batch size."
            )


def _sized(shape: Sequence[int]) -> str:
    return " × ".join(map(str, shape))


def rows_of_piece(engine: Engine, tensors: Sequence[Any], batch_size: Any, start: Any, size: Any) -> list[Any]:
    """What belongs to a piece, of tensors that have one or more rows for each sample of the batch."""

    def cut(tensor: Any) -> Any:
        if tensor is None:
            return None
        each = engine.size_of(tensor) // batch_size
        return engine.take_rows([tensor], start * each, size * each)[0]

    return [cut(tensor) for tensor in tensors]


def check_same_rows(engine: Engine, tensors: Sequence[Any], others: Sequence[Any]) -> None:
    """Raises UnsupportedModelError, now or when it runs, where tensors have other rows than what belongs to them."""
    for tensor, other in zip(tensors, others, strict=True):
        if other is not None and len(tensor.shape):
            engine.insist(engine.size_of(tensor), engine.size_of(other), _UNLIKE)


def predicted(
    compute: Callable[[int, int], Any], batch_size: int, pieces: int, join: Callable[[Sequence[Any]], Any]
) -> Any:
    """Outputs of a batch, computed in pieces.

    Args:
        compute: Computes the outputs of samples `start` to `start + size`, and puts them on the host.
        batch_size: Samples in the batch.
        pieces: Number of pieces.
        join: Puts tensors one behind the other.
    """
    bounds = piece_bounds(batch_size, pieces)
    sizes = [stop - start for start, stop in bounds]
    parts = [compute(start, stop - start) for start, stop in bounds]
    for part, size in zip(parts, sizes, strict=True):
        check_rows(tensors_in(part), size)
    if any(
        leaf.shape[0] not in (size, None) for part, size in zip(parts, sizes, strict=True) for leaf in tensors_in(part)
    ):
        check_order(tensors_in(compute(0, 2)), [tensors_in(compute(start, 1)) for start in range(2)])
    return tree.map_structure(lambda *leaves: None if leaves[0] is None else join(leaves), *parts)


def tensors_in(outputs: Any) -> list[Any]:
    return [leaf for leaf in tree.flatten(outputs) if leaf is not None]


def check_order(whole: Sequence[Any], pieces: Sequence[Sequence[Any]]) -> None:
    """Raises UnsupportedModelError unless outputs of pieces, one behind the other, are those of the whole."""
    for index, (output, *parts) in enumerate(zip(whole, *pieces, strict=True)):
        together = np.concatenate([np.asarray(part) for part in parts])
        if together.shape != output.shape or not np.allclose(together, np.asarray(output), rtol=1e-2, atol=1e-4):
            raise UnsupportedModelError(
                f"Output number {index + 1} of the model has {len(output)} rows for a few samples, and those of the "
                f"first sample do not come first. {_WHAT_TO_DO}"
            )
