"""Arrays in memory, in .npy and .npz files, in HDF5: read a batch at a time."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import numpy as np
from keras import tree

from oomproof.data.order import Indices
from oomproof.data.sources.array_files import Column, NpyColumn, column_of, members_of_npz
from oomproof.data.sources.shared import whole_number
from oomproof.data.stream import Source, Stream


def from_arrays(
    x: Any,
    y: Any = None,
    sample_weight: Any = None,
    *,
    batch_size: int = 32,
    shuffle: bool = False,
    seed: int | None = None,
    drop_remainder: bool = False,
    workers: int | None = None,
    max_queue_size: int | None = None,
) -> Stream:
    """Streams arrays that may be larger than memory.

    `x`, `y` and `sample_weight` are each an array, or a list, tuple or dict of arrays. An array is one of

    - anything with a shape and slices: NumPy arrays, memory maps, h5py datasets, ...;
    - the path of a .npy file, or `"file.npz:name"` for an array of an uncompressed .npz file;
    - `"file.h5:group/name"` for a dataset of an HDF5 file.

    `x` alone may be the path of a .npz file with the names `x`, `y` and optionally `sample_weight`.

    Files are read, not mapped, so the process holds no more than its batches. A shuffled epoch reads every sample once,
    in a new order, without a buffer. HDF5 reads whole chunks: store data to be shuffled in small ones.

    Args:
        x: Inputs.
        y: Targets.
        sample_weight: Weights.
        batch_size: Samples in a batch; the last batch of an epoch may have fewer.
        shuffle: Whether to shuffle, in a new order each epoch.
        seed: Seed of the order; drawn at random by default.
        drop_remainder: Whether to drop a last batch with fewer samples.
        workers: Number of reading threads.
        max_queue_size: Most batches to read ahead. Defaults to at most 10 and about 256 MiB.

    Returns:
        A `Stream`.

    Example:

    ```python
    stream = oomproof.data.from_arrays("x.npy", "y.npy", batch_size=256, shuffle=True, seed=1)
    model.fit(stream, epochs=10)
    ```
    """
    batch_size = whole_number(batch_size, "batch_size", least=1)
    if isinstance(x, (str, os.PathLike)) and os.fspath(x).endswith(".npz"):
        if y is not None or sample_weight is not None:
            raise ValueError(
                f"Expected the names of arrays, such as x='{os.fspath(x)}:x', where `y` is given. Received: x={x!r}"
            )
        x, y, sample_weight = members_of_npz(os.fspath(x))
    source = ArraySource(x, y, sample_weight)
    return Stream(source, batch_size, shuffle, seed, drop_remainder, workers, max_queue_size)


class ArraySource(Source):
    """Columns of the same length, in the structure of what was given."""

    def __init__(self, x: Any, y: Any, sample_weight: Any) -> None:
        if x is None:
            raise ValueError("Expected arrays or paths of arrays. Received: x=None")
        given = {"x": x, "y": y, "sample_weight": sample_weight}
        self._columns: dict[str, Any] = {
            name: _columns_of(value, name) for name, value in given.items() if value is not None
        }
        if "sample_weight" in self._columns and "y" not in self._columns:
            raise ValueError("Expected `y` where `sample_weight` is given. Received: y=None")
        leaves: list[Column] = tree.flatten(self._columns)
        counts = {column.name: len(column) for column in leaves}
        if len(set(counts.values())) != 1:
            sizes = ", ".join(f"{name} has {count:,}" for name, count in counts.items())
            raise ValueError(f"Expected the same number of samples everywhere. Received: {sizes}")
        self.count = len(leaves[0])
        if self.count == 0:
            raise ValueError(f"Expected at least one sample. Received: {leaves[0].name} of shape {leaves[0].shape}")
        self.sample_bytes = sum(column.sample_bytes for column in leaves)
        self._leaves = leaves

    def read(self, indices: Indices) -> Any:
        # Read as they lie on disk, then put in the order that was asked for.
        ranks = np.argsort(indices, kind="stable")
        places = np.empty_like(ranks)
        places[ranks] = np.arange(len(ranks))
        ascending = indices[ranks]
        in_order = bool((places[1:] > places[:-1]).all())

        def batch_of(column: Column) -> Any:
            if isinstance(column, NpyColumn):
                return column.take(ascending, ranks)
            found = column.take(ascending)
            return found if in_order else found[places]

        read = {name: tree.map_structure(batch_of, columns) for name, columns in self._columns.items()}
        if "y" not in read:
            return (read["x"],)
        return tuple(read.values())

    def __str__(self) -> str:
        return f"{self.count:,} samples of {', '.join(column.name for column in self._leaves)}"


def _columns_of(value: Any, name: str) -> Any:
    """The structure of `value`, with a `Column` for every array."""
    if isinstance(value, Mapping):
        return {key: _columns_of(part, f"{name}[{key!r}]") for key, part in value.items()}
    if isinstance(value, (list, tuple)) and value and not np.isscalar(value[0]):
        return tuple(_columns_of(part, f"{name}[{place}]") for place, part in enumerate(value))
    return column_of(value, name)
