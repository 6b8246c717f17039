"""TFRecords by number. TensorFlow reads and checks them, whatever Keras's backend is."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from oomproof.data.order import Indices
from oomproof.data.sources.generators import as_batch, stacked
from oomproof.data.sources.shared import progress
from oomproof.data.stream import Source

# Length (8 bytes) and its checksum before a record, the checksum of the record after it.
_HEAD, _TAIL = 12, 4
# Places are read ahead by this much: most records are smaller.
_AHEAD = 2**20


class RecordSource(Source):
    """Records of several files, found by their places."""

    def __init__(
        self,
        files: list[str],
        features: Mapping[str, Any] | None,
        label: str | None,
        parse: Callable[[bytes], Any] | None,
        *,
        skip: bool,
    ) -> None:
        # Reads a record at an offset and checks it, which the public readers, who begin at the beginning, do not.
        from oomproof._compat.tf_data import RandomRecordReader

        self._reader = RandomRecordReader
        self._files = files
        self._features = dict(features) if features is not None else None
        self._label = label
        self._parse = parse
        self._skip = skip
        self.corrupt: dict[str, str] = {}
        self._unreadable: set[int] = set()
        self._local = threading.local()
        places = self._places()
        self._ends = np.cumsum([len(offsets) for offsets in places])
        self._offsets = np.concatenate(places)
        self.count = len(self._offsets)
        if not self.count:
            raise ValueError(f"Expected at least one record. Received: none in {len(files)} files such as {files[0]!r}")
        sizes = sum(os.path.getsize(file) for file in files)
        self.sample_bytes = sizes // self.count

    def read(self, indices: Indices) -> Any:
        found = [self._record(int(index)) for index in indices]
        if self._features is None:
            return stacked(found)
        import tensorflow as tf

        parsed = tf.io.parse_example(np.array(found, object), self._features)
        arrays = {name: _array(value, name) for name, value in parsed.items()}
        if self._label is None:
            return as_batch(_alone(arrays))
        target = arrays.pop(self._label)
        return _alone(arrays), target

    def _record(self, index: int) -> Any:
        """A record, or the next one that can be read: serialized, or as `parse` makes it."""
        for step in range(self.count):
            place = (index + step) % self.count
            if place in self._unreadable:
                continue
            file = int(np.searchsorted(self._ends, place, side="right"))
            try:
                record = self._opened(file).read(int(self._offsets[place]))[0]
                return record if self._parse is None else self._parse(record)
            except Exception as wrong:  # TensorFlow's errors, and whatever `parse` stumbles over.
                name = f"{self._files[file]} at byte {int(self._offsets[place]):,}"
                self._found_corrupt(name, f"{type(wrong).__name__}: {wrong}", wrong)
                self._unreadable.add(place)
        raise ValueError(f"None of {self.count:,} records in {len(self._files)} files is readable")

    def _opened(self, file: int) -> Any:
        # One reader for each thread and file: a reader has a position.
        readers = self._local.__dict__.setdefault("readers", {})
        if file not in readers:
            readers[file] = self._reader(self._files[file])
        return readers[file]

    def _found_corrupt(self, name: str, reason: str, wrong: Exception | None = None) -> None:
        if not self._skip:
            raise ValueError(
                f"The record of {name} cannot be read ({reason}). Write the file again, or pass on_corrupt='skip' to "
                "skip such records."
            ) from wrong
        self.corrupt[name] = reason

    def _places(self) -> list[Any]:
        """Offsets of the records, file by file."""
        places, count = [], 0
        with progress("Looking for records") as tell:
            for path in self._files:
                offsets = []
                for offset in self._offsets_in(path):
                    offsets.append(offset)
                    count += 1
                    tell(count)
                places.append(np.array(offsets, np.int64))
        return places

    def _offsets_in(self, path: str) -> Any:
        size = os.path.getsize(path)
        with open(path, "rb", buffering=_AHEAD) as file:
            if file.read(2) == b"\x1f\x8b":
                raise ValueError(f"Expected records that are not compressed. Received: {path}, which is (gzip)")
            offset = 0
            while offset < size:
                file.seek(offset)
                head = file.read(_HEAD)
                length = int.from_bytes(head[:8], "little")
                end = offset + _HEAD + length + _TAIL
                if len(head) < _HEAD or _masked_crc(head[:8]) != int.from_bytes(head[8:], "little"):
                    self._found_corrupt(
                        f"{path} at byte {offset:,}", "its length is damaged; the rest of the file is skipped"
                    )
                    return
                if end > size:
                    reason = f"truncated: it has {size - offset - _HEAD:,} of {length:,} bytes"
                    self._found_corrupt(f"{path} at byte {offset:,}", reason)
                    return
                yield offset
                offset = end

    def __str__(self) -> str:
        return f"{self.count:,} records in {len(self._files)} files"


def _alone(arrays: dict[str, Any]) -> Any:
    return next(iter(arrays.values())) if len(arrays) == 1 else arrays


def _array(value: Any, name: str) -> Any:
    if not hasattr(value, "numpy") or hasattr(value, "indices"):
        raise TypeError(
            f"Expected features of a fixed length. Received: {name!r}, which is sparse or ragged. "
            "Use tf.io.FixedLenFeature, or `parse`."
        )
    return value.numpy()


def _table() -> list[int]:
    """CRC-32C (Castagnoli), a byte at a time."""
    found = []
    for value in range(256):
        for _ in range(8):
            value = (value >> 1) ^ (0x82F63B78 if value & 1 else 0)
        found.append(value)
    return found


_CRC = _table()


def _masked_crc(data: bytes) -> int:
    """The checksum as TFRecord files have it. Only for lengths: records are checked by TensorFlow."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _CRC[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    crc ^= 0xFFFFFFFF
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF
