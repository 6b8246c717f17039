"""In which order an epoch reads its samples: a function of (seed, epoch), so that any position can be come back to.

A full shuffle needs no shuffle buffer where samples can be read by number, only a permutation of the numbers. Up to
`_TABLE` samples that is a table, drawn by NumPy. Beyond, a Feistel network computes it: four bytes a sample would be
400 MB for a hundred million samples, and a network needs none, and no time at the start of an epoch.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

Indices = np.ndarray[Any, np.dtype[np.int64]]

_TABLE = 2**20
_ROUNDS = 8


class InOrder:
    """Samples as they come."""

    def __init__(self, count: int) -> None:
        self.count = count

    def samples(self, epoch: int, start: int, stop: int) -> Indices:
        """Numbers of the samples at the positions `start` to `stop` of an epoch."""
        return np.arange(start, min(stop, self.count), dtype=np.int64)


class Shuffled:
    """Every sample once an epoch, each epoch in another order."""

    def __init__(self, count: int, seed: int) -> None:
        self.count = count
        self.seed = seed
        # The epoch that is read and the one before or after it: what is prefetched may belong to either.
        self._table = functools.lru_cache(maxsize=2)(self._draw)

    def samples(self, epoch: int, start: int, stop: int) -> Indices:
        stop = min(stop, self.count)
        if self.count <= _TABLE:
            return self._table(epoch)[start:stop].astype(np.int64)
        return permuted(np.arange(start, stop), self.count, _keys(self.seed, epoch))

    def _draw(self, epoch: int) -> np.ndarray[Any, np.dtype[np.uint32]]:
        table = np.arange(self.count, dtype=np.uint32)
        np.random.default_rng([self.seed, epoch]).shuffle(table)
        return table


class ShuffledBlocks:
    """For storage that is quick only in whole blocks: blocks in random order, rows mixed within `mix` blocks at a time.

    Not a full shuffle: rows that are stored close together stay within the same `mix` blocks of an epoch. Which blocks
    those are differs from epoch to epoch.
    """

    def __init__(self, block_rows: Sequence[int], seed: int, mix: int) -> None:
        self.count = int(sum(block_rows))
        self.seed = seed
        self.mix = mix
        self._rows = np.asarray(block_rows, dtype=np.int64)
        self._first = np.concatenate([[0], np.cumsum(self._rows)[:-1]])
        self._plan = functools.lru_cache(maxsize=2)(self._draw)
        self._group = functools.lru_cache(maxsize=4)(self._mixed)

    def samples(self, epoch: int, start: int, stop: int) -> Indices:
        _, ends = self._plan(epoch)
        stop = min(stop, self.count)
        parts = []
        group = int(np.searchsorted(ends, start, side="right"))
        while start < stop:
            begin = int(ends[group - 1]) if group else 0
            upto = min(stop, int(ends[group]))
            parts.append(self._group(epoch, group)[start - begin : upto - begin])
            start, group = upto, group + 1
        return np.concatenate(parts) if parts else np.empty(0, np.int64)

    def _draw(self, epoch: int) -> tuple[Indices, Indices]:
        """Blocks in the order of an epoch, and where each group of `mix` of them ends."""
        blocks = np.random.default_rng([self.seed, epoch]).permutation(len(self._rows))
        ends = np.cumsum(self._rows[blocks])
        last = np.append(np.arange(self.mix - 1, len(blocks) - 1, self.mix), len(blocks) - 1)
        return blocks, ends[last]

    def _mixed(self, epoch: int, group: int) -> Indices:
        blocks = self._plan(epoch)[0][group * self.mix : (group + 1) * self.mix]
        rows = np.concatenate([np.arange(self._first[b], self._first[b] + self._rows[b]) for b in blocks])
        np.random.default_rng([self.seed, epoch, group]).shuffle(rows)
        return rows


Order = InOrder | Shuffled | ShuffledBlocks


def permuted(positions: Indices, count: int, keys: Any) -> Indices:
    """Where a permutation of `range(count)` takes each position.

    A Feistel network permutes the next power of two; a result that is not below `count` goes through again, which ends
    because it walks along a cycle that began below `count`.
    """
    bits = (count - 1).bit_length()
    values = _feistel(positions.astype(np.uint64), bits, keys)
    outside = np.flatnonzero(values >= count)
    while len(outside):
        values[outside] = _feistel(values[outside], bits, keys)
        outside = outside[values[outside] >= count]
    found: Indices = values.astype(np.int64)
    return found


def _feistel(values: Any, bits: int, keys: Any) -> Any:
    low_bits, high_bits = bits // 2, bits - bits // 2
    low, high = values & np.uint64(2**low_bits - 1), values >> np.uint64(low_bits)
    for key in keys:  # An even number of rounds, after which the halves have their widths again.
        low = (low ^ _hashed(high ^ key)) & np.uint64(2**low_bits - 1)
        low, high, low_bits, high_bits = high, low, high_bits, low_bits
    return (high << np.uint64(low_bits)) | low


def _hashed(values: Any) -> Any:
    """The finaliser of splitmix64. Overflow is meant."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


@functools.lru_cache(maxsize=8)
def _keys(seed: int, epoch: int) -> Any:
    return np.random.SeedSequence([seed, epoch]).generate_state(_ROUNDS, np.uint64)
