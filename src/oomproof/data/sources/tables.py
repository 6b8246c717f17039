"""Parquet, Arrow, Feather and CSV files: read a block of rows at a time."""

from __future__ import annotations

import collections
import os
import threading
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from oomproof.data.order import Indices
from oomproof.data.sources.shared import files_of, needed, one_of, progress, whole_number
from oomproof.data.stream import Source, Stream

_FORMATS = {".parquet": "parquet", ".pq": "parquet", ".arrow": "ipc", ".feather": "ipc", ".ipc": "ipc", ".csv": "csv"}
_CSV_BLOCK = 2**23


def from_table(
    path: str | os.PathLike[str] | Sequence[str],
    *,
    batch_size: int = 256,
    columns: Sequence[str] | None = None,
    label: str | None = None,
    output: Literal["matrix", "columns"] = "matrix",
    shuffle: bool = False,
    seed: int | None = None,
    mix_blocks: int = 4,
    drop_remainder: bool = False,
    workers: int | None = None,
    max_queue_size: int | None = None,
) -> Stream:
    """Streams the rows of a table: a file, a list of files or a folder of files, all of one format.

    Rows are read in blocks: row groups of Parquet, record batches of Arrow and Feather, and about 8 MB of a CSV file,
    which is read once to find them. A shuffled epoch takes the blocks in random order, `mix_blocks` at a time, and
    shuffles their rows together. That is not a full shuffle, so do not sort such files by label. About twice
    `mix_blocks` blocks are in memory.

    Args:
        path: Files to read: .parquet, .arrow, .feather or .csv.
        batch_size: Rows in a batch; the last batch of an epoch may have fewer.
        columns: The inputs. Defaults to all columns but the label.
        label: The target. Without one, batches have inputs only.
        output: `"matrix"` for inputs as one float32 array of shape (rows, columns); `"columns"` for a dict of arrays.
        shuffle: Whether to shuffle, in a new order each epoch.
        seed: Seed of the order; drawn at random by default.
        mix_blocks: Number of blocks whose rows are shuffled together.
        drop_remainder: Whether to drop a last batch with fewer rows.
        workers: Number of reading threads.
        max_queue_size: Most batches to read ahead. Defaults to at most 10 and about 256 MiB.

    Returns:
        A `Stream`.
    """
    batch_size = whole_number(batch_size, "batch_size", least=1)
    mix_blocks = whole_number(mix_blocks, "mix_blocks", least=1)
    one_of(output, "output", "matrix", "columns")
    needed("pyarrow", "tables")
    held = 2 * mix_blocks if shuffle else 2
    source = TableSource(_tables(path), columns, label, output == "matrix", held)
    return Stream(source, batch_size, shuffle, seed, drop_remainder, workers, max_queue_size, mix_blocks)


class TableSource(Source):
    """Blocks of rows, the last ones that were read held as arrays."""

    block_rows: list[int]

    def __init__(
        self, files: list[str], columns: Sequence[str] | None, label: str | None, matrix: bool, held: int
    ) -> None:
        self._files = files
        self._format = _FORMATS[_kind(files[0])]
        self._blocks, self.block_rows, names = self._indexed()
        self.count = sum(self.block_rows)
        if self.count == 0:
            raise ValueError(f"Expected at least one row. Received: 0 rows in {len(files)} files such as {files[0]!r}")
        if missing := [name for name in [*(columns or []), *([label] if label else [])] if name not in names]:
            raise ValueError(f"Expected columns of {files[0]}: {', '.join(names)}. Received: {', '.join(missing)}")
        self._inputs = list(columns) if columns is not None else [name for name in names if name != label]
        self._label = label
        self._matrix = matrix
        self._ends = np.cumsum(self.block_rows)
        self._held = held
        self._cache: collections.OrderedDict[int, dict[str, Any]] = collections.OrderedDict()
        self._lock = threading.Lock()
        first = self._block(0)
        self.sample_bytes = sum(column.itemsize for column in first.values())

    def read(self, indices: Indices) -> Any:
        blocks = np.searchsorted(self._ends, indices, side="right")
        names = [*self._inputs, *([self._label] if self._label else [])]
        found: dict[str, Any] = {}
        for block in np.unique(blocks).tolist():
            here = np.flatnonzero(blocks == block)
            rows = indices[here] - (self._ends[block] - self.block_rows[block])
            for name, column in self._block(block).items():
                found.setdefault(name, np.empty(len(indices), column.dtype))[here] = column[rows]
        inputs: Any = {name: found[name] for name in names if name != self._label}
        if self._matrix:
            inputs = np.stack([found[name].astype(np.float32) for name in self._inputs], axis=1)
        return (inputs, found[self._label]) if self._label else (inputs,)

    def _block(self, block: int) -> dict[str, Any]:
        with self._lock:
            if block not in self._cache:
                self._cache[block] = self._loaded(block)
                while len(self._cache) > self._held:
                    self._cache.popitem(last=False)
            self._cache.move_to_end(block)
            return self._cache[block]

    def _loaded(self, block: int) -> dict[str, Any]:
        names = [*self._inputs, *([self._label] if self._label else [])]
        file, place = self._blocks[block]
        try:
            table = self._table(file, place, names)
        except Exception as wrong:  # pyarrow's errors name a column or an offset, not the file.
            raise ValueError(f"{self._files[file]} cannot be read at block {place}: {wrong}") from wrong
        return {name: self._array(table.column(name), name, self._files[file]) for name in names}

    def _array(self, column: Any, name: str, file: str) -> Any:
        if column.null_count:
            raise ValueError(
                f"Expected a value in every row. Received: {column.null_count:,} missing ones in {name!r} of {file}. "
                "Fill or drop them first, or select other columns with `columns`."
            )
        array = column.to_numpy()
        if array.dtype.hasobject:
            if self._matrix or name == self._label:
                raise TypeError(
                    f"Expected columns of numbers. Received: column {name!r} of type {column.type} in {file}. "
                    "Select other columns with `columns`, or pass output='columns' for text."
                )
            array = array.astype(str)
        return array

    def _table(self, file: int, place: Any, names: list[str]) -> Any:
        import pyarrow as pa

        path = self._files[file]
        if self._format == "parquet":
            import pyarrow.parquet as pq

            with pq.ParquetFile(path) as parquet:
                return parquet.read_row_group(place, columns=names)
        if self._format == "ipc":
            with pa.OSFile(path) as opened:
                return pa.Table.from_batches([pa.ipc.open_file(opened).get_batch(place)])
        return self._csv_block(path, *place)

    def _csv_block(self, path: str, begin: int, size: int) -> Any:
        import pyarrow as pa
        import pyarrow.csv as pc

        with open(path, "rb") as opened:
            header = opened.readline()
            opened.seek(begin)
            text = opened.read(size)
        names = pc.read_csv(pa.BufferReader(header)).column_names
        options = pc.ConvertOptions(column_types=self._types) if self._types else None
        read = pc.ReadOptions(column_names=names, block_size=max(size, 2) + 1)
        return pc.read_csv(pa.BufferReader(text), read_options=read, convert_options=options)

    def _indexed(self) -> tuple[list[tuple[int, Any]], list[int], list[str]]:
        """(file, place) of every block, its rows, and the names of the columns."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        blocks: list[tuple[int, Any]] = []
        rows: list[int] = []
        names: list[str] | None = None
        self._types: Any = None
        with progress("Looking at tables") as tell:
            for number, path in enumerate(self._files):
                try:
                    if self._format == "parquet":
                        with pq.ParquetFile(path) as parquet:
                            here = parquet.schema_arrow.names
                            found = [(g, parquet.metadata.row_group(g).num_rows) for g in range(parquet.num_row_groups)]
                    elif self._format == "ipc":
                        with pa.OSFile(path) as opened:
                            reader = pa.ipc.open_file(opened)
                            here = reader.schema.names
                            found = [(b, reader.get_batch(b).num_rows) for b in range(reader.num_record_batches)]
                    else:
                        here, found = self._csv_index(path)
                except Exception as wrong:
                    raise ValueError(f"{path} is not a readable {self._format} file: {wrong}") from wrong
                if names is not None and here != names:
                    raise ValueError(f"Expected the columns of {self._files[0]}: {names}. Received: {here} in {path}")
                names = here
                blocks += [(number, place) for place, count in found if count]
                rows += [count for _, count in found if count]
                tell(sum(rows))
        return blocks, rows, names or []

    def _csv_index(self, path: str) -> tuple[list[str], list[tuple[Any, int]]]:
        """Blocks of whole lines. Fields in quotes that go over several lines would be cut, and are refused."""
        import pyarrow as pa
        import pyarrow.csv as pc

        found: list[tuple[Any, int]] = []
        with open(path, "rb") as opened:
            header = opened.readline()
            names = pc.read_csv(pa.BufferReader(header)).column_names
            begin = opened.tell()
            while text := opened.read(_CSV_BLOCK):
                text += opened.readline()
                if text.count(b'"') % 2:
                    raise ValueError("quoted fields span several lines, which cannot be read in blocks")
                lines = sum(1 for line in text.splitlines() if line.strip())
                found.append(((begin, len(text)), lines))
                begin += len(text)
        if found and self._types is None:
            # Types are those of the first block: a block of whole numbers among fractions would change dtype.
            table = self._csv_block(path, *found[0][0])
            self._types = {
                field.name: pa.float64() if pa.types.is_integer(field.type) else field.type for field in table.schema
            }
        return names, found

    def __str__(self) -> str:
        return f"{self.count:,} rows in {len(self.block_rows):,} blocks of {len(self._files)} {self._format} files"


def _tables(path: Any) -> list[str]:
    files = files_of(path, "a table", lambda name: _kind(name) in _FORMATS)
    formats = {_FORMATS.get(_kind(file)) for file in files}
    if len(formats) != 1 or None in formats:
        raise ValueError(
            f"Expected files of one of the kinds {', '.join(_FORMATS)}. Received: {len(files)} files in {path!r}, of "
            f"kinds {sorted({os.path.splitext(file)[1] for file in files})}"
        )
    return files


def _kind(file: str) -> str:
    return os.path.splitext(file)[1].lower()
