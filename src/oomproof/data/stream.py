"""`Stream`: data of any size as batches, for `fit`, `evaluate` and `predict` on every backend."""

from __future__ import annotations

import abc
import functools
import itertools
import math
import random
import threading
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import keras

from oomproof._compat.keras import adapting
from oomproof.data import feeding
from oomproof.data.order import Indices, InOrder, Shuffled, ShuffledBlocks
from oomproof.data.sources.shared import whole_number

Batch = Any
# Batches that wait to be used are to take no more than this, unless the user says how many there may be.
_WAITING_BYTES = 256 * 2**20
_WAITING_BATCHES = 10


class Source(abc.ABC):
    """What can be read by the number of a sample, from several threads at a time.

    Attributes:
        count: Number of samples.
        sample_bytes: Bytes of one sample in a batch.
        block_rows: Rows of each block that is read at once, for storage that is not quick by number.
        workers: Threads that are of use.
        corrupt: What could not be read and was left out, each with the reason.
    """

    count: int
    sample_bytes: int
    block_rows: list[int] | None = None
    workers: int = 2
    corrupt: dict[str, str] = {}  # noqa: RUF012  # Empty where nothing is ever left out.

    @abc.abstractmethod
    def read(self, indices: Indices) -> Batch:
        """The samples as arrays: `(x,)`, `(x, y)` or `(x, y, sample_weight)`."""


class Sequential(abc.ABC):
    """What can only be read from its beginning.

    Attributes:
        steps: Number of batches, where it is known.
    """

    steps: int | None = None

    @abc.abstractmethod
    def iterate(self, skip: int) -> Iterator[Batch]:
        """Batches from the beginning, after the first `skip`."""


class Stream(keras.utils.PyDataset):  # type: ignore[misc]  # Keras is untyped
    """Batches of data that need not fit in memory. `from_arrays`, `from_files` and the like return one.

    A `keras.utils.PyDataset`: pass it to `fit`, `evaluate` or `predict`, index it, or iterate over it. Its order
    depends on seed and epoch only; `fit(shuffle=...)` has no effect. Each pass over the data is an epoch, and
    `stream[i]` is batch `i` of the latest one.

    Attributes:
        samples: Number of samples, or `None` for a generator.
        batch_size: Samples in a batch, or `None` for a generator of batches.
        seed: Seed of the order.
        state: The position of training, as a small dict for JSON: after the last trained batch if `keeper()` is among
            the callbacks of `fit`, else at the start of the next epoch.
    """

    def __new__(cls, *_: Any, **__: Any) -> Stream:
        stream: Stream = super().__new__(cls)
        _ADAPTING.__enter__()
        weakref.finalize(stream, _ADAPTING.give_up).atexit = False
        return stream

    def __init__(
        self,
        source: Source | Sequential,
        batch_size: int | None,
        shuffle: bool = False,
        seed: int | None = None,
        drop_remainder: bool = False,
        workers: int | None = None,
        max_queue_size: int | None = None,
        mix_blocks: int = 4,
    ) -> None:
        self.source = source
        self.batch_size = batch_size
        self.shuffle = shuffle
        # Drawn as Keras draws its own, so that `keras.utils.set_random_seed` counts.
        self.seed = random.randint(1, 10**9) if seed is None else whole_number(seed, "seed", least=0)
        self._drop_remainder = drop_remainder
        self._mix_blocks = mix_blocks
        self._indexed = source if isinstance(source, Source) else None
        self._sequential = source if isinstance(source, Sequential) else None
        self.samples = self._indexed.count if self._indexed else None
        self._set_order()
        workers = self._threads(workers)
        super().__init__(workers=workers, max_queue_size=self._queue(workers, max_queue_size))
        self._lock = threading.Lock()
        self._next_epoch = self._start = self._epoch = 0
        # After which batch training is, where a keeper counts.
        self._position: tuple[int, int] | None = None

    # What Keras asks for

    @property
    def num_batches(self) -> int | None:
        """Batches in an epoch, or `None` for a generator of unknown length."""
        if self._sequential:
            return self._sequential.steps
        assert self.samples is not None
        assert self.batch_size is not None
        whole = self.samples // self.batch_size
        return whole if self._drop_remainder else math.ceil(self.samples / self.batch_size)

    def __len__(self) -> int:
        if self.num_batches is None:
            raise TypeError(f"The length of {self.source} is unknown. Pass `steps=` to `from_generator`.")
        return self.num_batches

    def __getitem__(self, index: int) -> Batch:
        if self._sequential:
            return next(self._sequential.iterate(whole_number(index, "index", least=0)))
        if not -len(self) <= index < len(self):
            raise IndexError(f"Expected a batch below {len(self)}. Received: index={index}")
        return self.batch(self._epoch, index % len(self))

    def __iter__(self) -> Iterator[Batch]:
        return self.passes()

    def passes(self, *, counted: bool = True) -> Iterator[Batch]:
        """One pass over the data. It begins with its first batch, so that iterators nobody reads count for nothing.

        Args:
            counted: Whether this is an epoch. Otherwise it is a look at the epoch to come.
        """
        epoch, start = self.begin(counted=counted)
        if self._sequential:
            items = self._sequential.iterate(start)
            if self.num_batches is not None:
                items = itertools.islice(items, max(0, self.num_batches - start))
            calls: Any = itertools.repeat(functools.partial(next, items, feeding.END))
        else:
            calls = (functools.partial(self.batch, epoch, batch) for batch in range(start, len(self)))
        yield from feeding.ahead(calls, workers=self.workers, most=self.max_queue_size)

    def begin(self, *, counted: bool = True) -> tuple[int, int]:
        """Begins a pass: its epoch, and its first batch, which is 0 unless the stream was resumed."""
        with self._lock:
            epoch, start = self._next_epoch, self._start
            if counted:
                self._next_epoch, self._start, self._epoch = epoch + 1, 0, epoch
        return epoch, start

    def batch(self, epoch: int, batch: int) -> Batch:
        """A batch of any epoch."""
        if self._indexed is None or self.batch_size is None:
            raise TypeError(
                f"Batches of {self.source} come one after the other and cannot be indexed. Iterate over them."
            )
        start = batch * self.batch_size
        return self._indexed.read(self._order.samples(epoch, start, start + self.batch_size))

    @property
    def by_number(self) -> bool:
        """Whether any batch can be read, or only the next one."""
        return self._indexed is not None

    def looks(self) -> list[Batch]:
        """Batches to see shapes and dtypes from, as small as they can be."""
        if self._indexed:
            return [self._indexed.read(self._order.samples(self._next_epoch, 0, 2))]
        assert self._sequential
        return list(itertools.islice(self._sequential.iterate(0), 2))

    # Where it is

    @property
    def state(self) -> dict[str, Any]:
        return self.state_at(*(self._position or (self._next_epoch, self._start)))

    def state_at(self, epoch: int, batch: int) -> dict[str, Any]:
        """The state after `batch` batches of an epoch."""
        return {"epoch": epoch, "batch": batch, "seed": self.seed, **self._fingerprint()}

    def resume(self, state: Mapping[str, Any]) -> Stream:
        """Resumes at a saved state: the next pass begins at its batch, in its order.

        The first epoch of the next `fit` is the rest of the interrupted epoch. Keras then warns that the input ran out
        of data, because it expects a whole epoch.

        Args:
            state: The `state` of a stream over the same data with the same batch size.

        Returns:
            The stream itself.
        """
        for name, here in self._fingerprint().items():
            if state.get(name) != here:
                raise ValueError(
                    "Expected the state of a stream over the same data with the same settings. "
                    f"Received: {name}={state.get(name)!r} in the state, {here!r} in this stream of {self.source}. "
                    "Make the stream as before, or start without `resume`."
                )
        epoch, batch = whole_number(state.get("epoch"), "epoch", 0), whole_number(state.get("batch"), "batch", 0)
        if self.num_batches is not None and batch >= self.num_batches:
            epoch, batch = epoch + 1, 0
        with self._lock:
            self.seed = whole_number(state.get("seed"), "seed", 0)
            self._set_order()
            self._next_epoch, self._start, self._epoch, self._position = epoch, batch, epoch, None
        return self

    def keeper(self) -> keras.callbacks.Callback:
        """Returns a callback for `fit` that keeps `state` exact: it counts trained batches, not those read ahead.

        Put it before callbacks that save the state.
        """
        return _Keeper(self)

    def __repr__(self) -> str:
        batches = "an unknown number of" if self.num_batches is None else f"{self.num_batches:,}"
        size = f" of {self.batch_size}" if self.batch_size else ""
        order = f"shuffled with seed {self.seed}" if self.shuffle else "in order"
        reading = f"{self.workers} threads, at most {self.max_queue_size} batches waiting"
        return f"<Stream of {self.source}: {batches} batches{size}, {order}; {reading}>"

    @property
    def corrupt(self) -> list[tuple[str, str]]:
        """(what, why) of everything that could not be read and was skipped, sorted by name."""
        return sorted(self._indexed.corrupt.items()) if self._indexed else []

    # How it reads

    def _set_order(self) -> None:
        if not self._indexed:
            return
        count, blocks = self._indexed.count, self._indexed.block_rows
        if not self.shuffle:
            self._order: Any = InOrder(count)
        elif blocks is None:
            self._order = Shuffled(count, self.seed)
        else:
            self._order = ShuffledBlocks(blocks, self.seed, self._mix_blocks)

    def _fingerprint(self) -> dict[str, Any]:
        found = {"samples": self.samples, "batch_size": self.batch_size, "shuffle": self.shuffle}
        return {**found, "drop_remainder": self._drop_remainder}

    def _threads(self, asked: int | None) -> int:
        if self._sequential:
            # A generator runs in one thread: the one that reads ahead, or the one that trains.
            return 1 if asked is None else min(1, whole_number(asked, "workers", least=0))
        assert self._indexed
        return self._indexed.workers if asked is None else whole_number(asked, "workers", least=0)

    def _queue(self, workers: int, asked: int | None) -> int:
        if asked is not None:
            return whole_number(asked, "max_queue_size", least=1)
        if self._indexed is None or self.batch_size is None:
            return 2
        batch_bytes = max(1, self._indexed.sample_bytes * self.batch_size)
        return max(workers + 1, min(_WAITING_BATCHES, _WAITING_BYTES // batch_bytes))


class _Keeper(keras.callbacks.Callback):  # type: ignore[misc]  # Keras is untyped
    """Counts finished batches from where the stream stood when training began."""

    def __init__(self, stream: Stream) -> None:
        super().__init__()
        self._stream = stream

    def on_train_begin(self, logs: Any = None) -> None:
        self._stream._position = (self._stream._next_epoch, self._stream._start)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._last = -1

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        epoch, done = self._stream._position or (0, 0)
        done += batch - self._last  # More than one with `steps_per_execution`.
        self._last = batch
        whole = self._stream.num_batches
        self._stream._position = (epoch + 1, 0) if whole is not None and done >= whole else (epoch, done)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        # A pass of unknown length ends with Keras's epoch.
        if self._stream.num_batches is None and not self.params.get("steps"):
            self._stream._position = ((self._stream._position or (0, 0))[0] + 1, 0)


# Process-wide while a stream is there, since plain `fit` asks nobody; what is no stream gets Keras's own adapter.
_ADAPTING = adapting(Stream, feeding.StreamAdapter)
