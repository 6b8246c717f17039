"""Python generators and sequences."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from keras import tree

from oomproof.data.order import Indices
from oomproof.data.sources.shared import whole_number
from oomproof.data.stream import Sequential, Source, Stream


def from_generator(
    make: Callable[[], Any] | Sequence[Any],
    *,
    batch_size: int | None = None,
    steps: int | None = None,
    shuffle: bool = False,
    seed: int | None = None,
    drop_remainder: bool = False,
    workers: int | None = None,
    max_queue_size: int | None = None,
) -> Stream:
    """Streams the output of a Python generator, or the items of a sequence.

    One thread reads a generator, at most `max_queue_size` batches ahead. Each epoch calls `make` again; on TensorFlow,
    Keras also calls it once before the first, to look at two batches. To resume, batches that were already trained on
    are produced again and dropped, which takes as long as producing them. A sequence of samples is read by index: it
    can be shuffled, and resumes at once.

    Args:
        make: A function without arguments that returns a new iterator each epoch; or a sequence of samples (`len` and
            `[i]`), which several threads may read at a time.
        batch_size: Samples in a batch, for a generator of samples. `None` for a generator of batches: `x`, `(x, y)` or
            `(x, y, sample_weight)`.
        steps: Batches in an epoch, if known, or for a generator that does not end.
        shuffle: Whether to shuffle a sequence, in a new order each epoch.
        seed: Seed of the order; drawn at random by default.
        drop_remainder: Whether to drop a last batch with fewer samples.
        workers: Number of threads that read a sequence; 0 reads in the training thread.
        max_queue_size: Most batches to read ahead; 2 by default for a generator.

    Returns:
        A `Stream`.
    """
    if isinstance(make, Iterator):
        raise TypeError(
            "Expected a function that returns a new iterator each epoch, or a sequence: an iterator is used up after "
            f"one. Received: {make!r}. Pass the generator function itself: from_generator(samples), not samples()."
        )
    if batch_size is not None:
        batch_size = whole_number(batch_size, "batch_size", least=1)
    if steps is not None:
        steps = whole_number(steps, "steps", least=1)
    source: Source | Sequential
    if callable(make):
        if shuffle:
            raise ValueError(
                "Expected shuffle=False for a generator, which has an order of its own. Received: shuffle=True. "
                "Shuffle in the generator, or pass a sequence."
            )
        source = GeneratorSource(make, batch_size, steps, drop_remainder)
    elif hasattr(make, "__getitem__") and hasattr(make, "__len__"):
        if batch_size is None or steps is not None:
            raise ValueError(
                f"Expected `batch_size`, and no `steps`, for a sequence of samples. "
                f"Received: batch_size={batch_size}, steps={steps}"
            )
        source = SequenceSource(make)
    else:
        raise TypeError(f"Expected a function or a sequence. Received: {make!r} of {type(make)}")
    return Stream(source, batch_size, shuffle, seed, drop_remainder, workers, max_queue_size)


class GeneratorSource(Sequential):
    """Batches that a callable's iterator makes, or that are made of its samples."""

    def __init__(self, make: Callable[[], Any], batch_size: int | None, steps: int | None, drop: bool) -> None:
        self._make = make
        self._batch_size = batch_size
        self._drop = drop
        self.steps = steps

    def iterate(self, skip: int) -> Iterator[Any]:
        made = 0
        items = self._items()
        for _ in range(skip * (self._batch_size or 1)):
            next(items, None)
        while True:
            if self._batch_size is None:
                group = list(itertools.islice(items, 1))
            else:
                group = list(itertools.islice(items, self._batch_size))
            if not group or (self._drop and self._batch_size and len(group) < self._batch_size):
                break
            made += 1
            yield as_batch(group[0]) if self._batch_size is None else stacked(group)
        if self.steps is not None and skip + made < self.steps:
            raise ValueError(
                f"{self} ended after {skip + made:,} batches. Expected: steps={self.steps:,}. "
                "Pass the number of batches that it makes, or make more."
            )

    def _items(self) -> Iterator[Any]:
        items = iter(self._make())
        for place in itertools.count():
            try:
                item = next(items)
            except StopIteration:
                return
            except Exception as wrong:
                wrong.add_note(f"Raised by {self} at item {place:,} of an epoch (counted from 0).")
                raise
            yield item

    def __str__(self) -> str:
        return f"the generator {getattr(self._make, '__qualname__', repr(self._make))}"


class SequenceSource(Source):
    """Samples by number, from anything with `len` and `[i]`."""

    def __init__(self, items: Any) -> None:
        self._items = items
        self.count = len(items)
        if self.count == 0:
            raise ValueError(f"Expected at least one sample. Received: a {type(items).__name__} of length 0")
        self.sample_bytes = sum(np.asarray(part).nbytes for part in tree.flatten(items[0]))

    def read(self, indices: Indices) -> Any:
        return stacked([self._items[int(index)] for index in indices])

    def __str__(self) -> str:
        return f"{self.count:,} samples of a {type(self._items).__name__}"


def stacked(samples: list[Any]) -> Any:
    """Samples as a batch, in the structure of each."""
    try:
        return as_batch(tree.map_structure(lambda *parts: np.stack([np.asarray(part) for part in parts]), *samples))
    except ValueError as wrong:
        shapes = [[np.shape(part) for part in tree.flatten(sample)] for sample in (samples[0], samples[-1])]
        raise ValueError(
            f"Expected samples of the same structure and shape. Received: {shapes[0]} and {shapes[1]} among "
            f"{len(samples)} samples of a batch ({wrong}). Pad them, or pass batches."
        ) from wrong


def as_batch(made: Any) -> Any:
    """What Keras takes: a tuple of one to three."""
    if isinstance(made, list):
        made = tuple(made)
    return made if isinstance(made, tuple) else (made,)
