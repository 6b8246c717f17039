"""One array of N samples, wherever it is kept, as something that gives the samples with given numbers."""

from __future__ import annotations

import itertools
import math
import mmap
import os
import threading
import zipfile
from typing import Any

import numpy as np
from numpy.lib import format as npy_format

from oomproof._records.units import format_bytes
from oomproof.data.order import Indices
from oomproof.data.sources.shared import aligned, existing, needed

# A compressed array of up to this size is loaded whole: nobody runs out of memory for it.
_LOADED_BYTES = 256 * 2**20
# A file of up to this size too: samples of a few bytes, such as labels, are quicker had than read one by one.
_SMALL_BYTES = 16 * 2**20
# Most rows that one call of `preadv` may fill (IOV_MAX).
_PIECES = 1024
_NO_WAIT = getattr(os, "RWF_NOWAIT", None)
# Every read hands Python's lock over. Two threads that do so for each row of a few kilobytes wait for one another most
# of the time: together they read a third of what one alone does. Rows larger than this take the disk longer than that.
_SMALL_ROW = 128 * 2**10
_many_calls = threading.Lock()


class Column:
    """An array whose samples are taken by slices or by number: NumPy's, a memory map, or anything that works alike."""

    def __init__(self, array: Any, name: str) -> None:
        self.name = name
        self._array = array
        self.shape = tuple(array.shape)
        self.dtype = np.dtype(str(array.dtype)) if not isinstance(array.dtype, np.dtype) else array.dtype
        if not self.shape:
            raise ValueError(f"Expected an array with a first dimension of samples. Received: {name} of shape ()")
        if self.dtype.hasobject:
            raise TypeError(
                f"Expected an array of numbers, booleans or fixed-size text. Received: {name} of dtype {self.dtype}"
            )
        self.sample_bytes = math.prod(self.shape[1:]) * self.dtype.itemsize

    def __len__(self) -> int:
        return int(self.shape[0])

    def take(self, ascending: Indices) -> Any:
        """The samples with these numbers, which ascend."""
        if len(ascending) and ascending[-1] - ascending[0] == len(ascending) - 1:
            # A copy, or a batch would hold the pages of a map and change with the array.
            return np.array(self._array[int(ascending[0]) : int(ascending[-1]) + 1])
        return np.asarray(self._array[ascending])


class NpyColumn(Column):
    """Rows that lie one after the other in a file, read with `preadv`.

    A map would do as well, but its pages count as memory of the process until the system wants them back.
    """

    def __init__(self, path: str, offset: int, shape: tuple[int, ...], dtype: Any, name: str) -> None:
        super().__init__(np.broadcast_to(np.zeros((), dtype), shape), name)
        self._path = path
        self._offset = offset
        self._descriptor = os.open(path, os.O_RDONLY)
        there = os.fstat(self._descriptor).st_size - offset
        if there < len(self) * self.sample_bytes:
            os.close(self._descriptor)
            self._descriptor = -1
            raise ValueError(
                f"{path} is truncated: its header says {len(self):,} samples of {format_bytes(self.sample_bytes)}, "
                f"{len(self) * self.sample_bytes:,} bytes, but it has {there:,}. Copy or write it again."
            )

    def take(self, ascending: Indices, ranks: Indices | None = None) -> Any:
        """The samples with these numbers.

        Args:
            ascending: Their numbers.
            ranks: Where each belongs in the batch; by default one after the other.
        """
        batch = aligned((len(ascending), *self.shape[1:]), self.dtype)
        if not batch.size:
            return batch
        ranges = self._ranges(batch, ascending, np.arange(len(ascending)) if ranks is None else ranks)
        if len(ranges) == 1:
            self._fill(*ranges[0])
        elif self.sample_bytes > _SMALL_ROW:
            self._fill_all(ranges)
        else:
            with _many_calls:
                self._fill_all(ranges)
        return batch

    def _ranges(self, batch: Any, ascending: Indices, places: Indices) -> list[tuple[list[Any], int]]:
        """What one call each can read, neighbors on disk together: (where the rows belong, where they begin)."""
        room, size = memoryview(batch.reshape(-1).view(np.uint8)), self.sample_bytes
        offsets = (self._offset + ascending * size).tolist()
        ends = [0, *(np.flatnonzero(np.diff(ascending) != 1) + 1).tolist(), len(places)]
        if len(ends) == 2 and (np.diff(places) == 1).all():
            return [([room], offsets[0])]
        rows = [room[place * size : (place + 1) * size] for place in places.tolist()]
        return [
            (rows[first : min(first + _PIECES, end)], offsets[first])
            for begin, end in itertools.pairwise(ends)
            for first in range(begin, end, _PIECES)
        ]

    def _fill_all(self, ranges: list[tuple[list[Any], int]]) -> None:
        """Reads what the system has in memory. From the first range on that it has not, it is told of all of them
        before one is waited for, so that it fetches many at a time: one after the other a disk would give a third of
        what it can."""
        there = 0
        while there < len(ranges) and self._read_cached(*ranges[there]):
            there += 1
        if hasattr(os, "posix_fadvise"):
            for buffers, at in ranges[there:]:
                os.posix_fadvise(self._descriptor, at, len(buffers) * self.sample_bytes, os.POSIX_FADV_WILLNEED)
        for buffers, at in ranges[there:]:
            self._fill(buffers, at)

    def _read_cached(self, buffers: list[Any], at: int) -> bool:
        try:
            wanted = len(buffers) * self.sample_bytes
            return _NO_WAIT is not None and os.preadv(self._descriptor, buffers, at, _NO_WAIT) == wanted
        except OSError:  # Not in memory, or a file system that cannot say.
            return False

    def _fill(self, buffers: list[Any], at: int) -> None:
        wanted = sum(buffer.nbytes for buffer in buffers)
        read = os.preadv(self._descriptor, buffers, at)
        while read < wanted:  # A call reads at most 2 GiB, and fewer where it is interrupted.
            skipped, rest = 0, []
            for buffer in buffers:
                done = min(max(read - skipped, 0), buffer.nbytes)
                skipped += buffer.nbytes
                if done < buffer.nbytes:
                    rest.append(buffer[done:])
            more = os.preadv(self._descriptor, rest, at + read)
            if not more:
                raise OSError(
                    f"{self._path} ended at byte {at + read:,} while it was read. Is something writing to it?"
                )
            read += more

    def __del__(self) -> None:
        if getattr(self, "_descriptor", -1) >= 0:
            os.close(self._descriptor)


class Hdf5Column(Column):
    """A dataset of an HDF5 file. HDF5 is no library for threads, so one reads at a time."""

    _lock = threading.Lock()

    def __init__(self, dataset: Any, name: str) -> None:
        super().__init__(dataset, name)

    def take(self, ascending: Indices) -> Any:
        first, last = int(ascending[0]), int(ascending[-1])
        with self._lock:
            # Picking rows by number takes HDF5 far longer than reading them, unless there are many between.
            if last - first < 4 * len(ascending):
                near = aligned((last - first + 1, *self.shape[1:]), self.dtype)
                self._array.read_direct(near, np.s_[first : last + 1])
                return near if last - first == len(ascending) - 1 else near[ascending - first]
            batch = aligned((len(ascending), *self.shape[1:]), self.dtype)
            ends = [0, *(np.flatnonzero(np.diff(ascending) != 1) + 1), len(ascending)]
            for begin, end in itertools.pairwise(ends):
                self._array.read_direct(
                    batch, np.s_[int(ascending[begin]) : int(ascending[end - 1]) + 1], np.s_[int(begin) : int(end)]
                )
            return batch


def column_of(value: Any, name: str) -> Column:
    """What a user gave as one array."""
    if isinstance(value, (str, os.PathLike)):
        return _column_of_path(os.fspath(value), name)
    if isinstance(value, (list, tuple)):
        value = np.asarray(value)
    if not hasattr(value, "shape") or not hasattr(value, "dtype"):
        raise TypeError(
            f"Expected an array, a path, or anything with shape, dtype and slices. Received: {name} of {type(value)}"
        )
    if type(value).__module__.startswith("h5py."):
        return Hdf5Column(value, name)
    if isinstance(value, np.memmap) and (place := _place_of(value)) is not None:
        return NpyColumn(*place, value.shape, value.dtype, name)
    return Column(value, name)


def members_of_npz(path: str) -> tuple[Any, Any, Any]:
    """The arrays `x`, `y` and `sample_weight` of a .npz file."""
    existing(path, "a .npz file")
    with zipfile.ZipFile(path) as archive:
        names = [name.removesuffix(".npy") for name in archive.namelist()]
    if "x" not in names or set(names) - {"x", "y", "sample_weight"}:
        raise ValueError(
            f"Expected arrays with the names x, y and sample_weight in {path}. Received: {', '.join(names)}. "
            f"Name the ones to use: from_arrays('{path}:{names[0] if names else 'name'}', ...)"
        )
    x, y, weight = (f"{path}:{name}" if name in names else None for name in ("x", "y", "sample_weight"))
    return x, y, weight


def _column_of_path(path: str, name: str) -> Column:
    file, colon, inside = path.rpartition(":")
    if path.endswith(".npy"):
        return _npy(existing(path, "a .npy file"), name)
    if colon and file.endswith(".npz"):
        return _npz(existing(file, "a .npz file"), inside, name)
    if colon and file.endswith((".h5", ".hdf5", ".he5", ".hdf")):
        return _hdf5(existing(file, "an HDF5 file"), inside, name)
    raise ValueError(
        f"Expected the path of a .npy file, 'file.npz:name' or 'file.h5:group/name'. Received: {name}={path!r}"
    )


def _npy(path: str, name: str) -> Column:
    with open(path, "rb") as file:
        return _npy_at(path, file, name)


def _npy_at(path: str, file: Any, name: str) -> Column:
    try:
        version = npy_format.read_magic(file)
        header = npy_format.read_array_header_1_0 if version == (1, 0) else npy_format.read_array_header_2_0
        shape, fortran, dtype = header(file)
    except ValueError as wrong:
        raise ValueError(f"{path} is not a readable .npy file: {wrong}") from wrong
    if fortran and len(shape) > 1:
        raise ValueError(
            f"Expected rows in C order. Received: {path} in Fortran order. Save np.ascontiguousarray(array) instead."
        )
    Column(np.broadcast_to(np.zeros((), dtype), shape), name)  # Its checks come before the file's.
    column = NpyColumn(path, file.tell(), shape, dtype, name)
    if len(column) * column.sample_bytes <= _SMALL_BYTES:
        return Column(column.take(np.arange(len(column))), name)
    return column


def _npz(path: str, member: str, name: str) -> Column:
    with zipfile.ZipFile(path) as archive:
        found = {entry.filename.removesuffix(".npy"): entry for entry in archive.infolist()}
        if member not in found:
            raise ValueError(f"Expected one of the arrays in {path}: {', '.join(found)}. Received: {member!r}")
        entry = found[member]
        if entry.compress_type != zipfile.ZIP_STORED:
            if entry.file_size > _LOADED_BYTES:
                raise ValueError(
                    f"'{member}' in {path} is compressed: reading any part of it takes {entry.file_size:,} bytes "
                    f"({format_bytes(entry.file_size)}) of memory. Write it with np.savez or np.save instead of "
                    "np.savez_compressed."
                )
            with archive.open(entry) as file:
                return Column(npy_format.read_array(file), name)
    with open(path, "rb") as file:
        # Name and extra field stand between the entry's own header and its bytes.
        file.seek(entry.header_offset + 26)
        name_bytes, extra_bytes = np.frombuffer(file.read(4), "<u2").tolist()
        file.seek(entry.header_offset + 30 + name_bytes + extra_bytes)
        return _npy_at(path, file, name)


def _hdf5(path: str, inside: str, name: str) -> Column:
    h5py = needed("h5py", "HDF5")
    try:
        file = h5py.File(path, "r")
    except OSError as wrong:
        raise OSError(f"{path} is not a readable HDF5 file: {wrong}") from wrong
    if not isinstance(found := file.get(inside), h5py.Dataset):
        names: list[str] = []
        file.visititems(lambda key, item: names.append(key) if isinstance(item, h5py.Dataset) else None)
        file.close()
        raise ValueError(f"Expected one of the datasets in {path}: {', '.join(names[:20])}. Received: {inside!r}")
    return Hdf5Column(found, name)


def _place_of(array: np.memmap[Any, Any]) -> tuple[str, int] | None:
    """File and offset of a memory map, or of a part of one, whose rows lie one after the other."""
    mapped = getattr(array, "_mmap", None)
    if mapped is None or array.mode == "c" or array.filename is None or not array.flags.c_contiguous:
        return None
    begin = np.frombuffer(mapped, np.uint8).__array_interface__["data"][0]
    inside = array.__array_interface__["data"][0] - begin
    offset = array.offset - array.offset % mmap.ALLOCATIONGRANULARITY + inside
    return str(array.filename), offset
