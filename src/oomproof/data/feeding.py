"""How a stream reaches Keras: batches made ahead by threads, and an order that `fit(shuffle=True)` cannot disturb.

Keras wraps a `PyDataset` in a `PyDatasetAdapter`, which shuffles the order of batches with Python's `random` unless
told `shuffle=False`, and whose queue, when it is stopped, keeps batches for the next epoch: Keras stops it once before
the first epoch, after looking at a batch to build the model. Neither order can be come back to. So for a stream, and
only for a stream, the adapter is one of ours: it takes batches from the stream itself, one iterator for each pass.
Everything else (class weights, conversion to tensors) stays Keras's. Should a future Keras not ask for its adapter like
this, a stream is still a valid `PyDataset` there, in Keras's order; tests/backends/test_data_sources_fit.py tells.
"""

from __future__ import annotations

import atexit
import collections
import concurrent.futures
import functools
import itertools
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
from keras import tree

from oomproof._compat.keras import PyDatasetAdapter, data_adapter_utils

if TYPE_CHECKING:
    from oomproof.data.stream import Stream

END = object()


def ahead(calls: Iterable[Callable[[], Any]], *, workers: int, most: int) -> Iterator[Any]:
    """What the calls return, in their order, made by threads that are at most `most` calls ahead of the reader.

    An exception of a call is raised where its result would have come. Whoever stops reading closes the iterator (or
    drops it): calls that have not begun are forgotten, and nobody waits for the others.

    Args:
        calls: What to call. Ends early when one returns `END`.
        workers: Threads; with 0 the reader makes the calls itself.
        most: Results that may exist at a time, those in the making included.
    """
    if workers == 0:
        yield from itertools.takewhile(lambda result: result is not END, (call() for call in calls))
        return
    remaining = iter(calls)
    pool = concurrent.futures.ThreadPoolExecutor(workers, thread_name_prefix="oomproof-data")
    try:
        pending = collections.deque(pool.submit(call) for call in itertools.islice(remaining, most))
        while pending:
            result = pending.popleft().result()
            if result is END:
                return
            # The reader holds one batch while it uses it; the next call begins only when it asks for another.
            yield result
            del result
            pending.extend(pool.submit(call) for call in itertools.islice(remaining, 1))
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


class _Calls:
    """Calls from TensorFlow's threads, which must not be under way when Python ends: it ends a thread that wants to run
    Python then, and TensorFlow waits for that thread for ever. (A dataset outlives a `fit` that was stopped early.)"""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open = self._begun = 0
        self._ending = False

    def __enter__(self) -> bool:
        with self._lock:
            self._open += 1
            self._begun += 1
        return not self._ending

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._open -= 1

    def end(self) -> None:
        """Lets nothing new begin, and waits until the buffers of TensorFlow are full of nothing."""
        self._ending = True
        until = time.monotonic() + 10
        quiet = begun = 0
        while self._begun and quiet < 5 and time.monotonic() < until:
            time.sleep(0.01)
            quiet = quiet + 1 if not self._open and begun == self._begun else 0
            begun = self._begun


_inside_tensorflow = _Calls()
atexit.register(_inside_tensorflow.end)


class StreamAdapter(PyDatasetAdapter):  # type: ignore[misc]  # Keras is untyped
    """Keras's adapter, taking batches in the order of the stream."""

    def __init__(self, x: Stream, class_weight: Any = None, shuffle: bool = False) -> None:
        super().__init__(x, class_weight=class_weight, shuffle=False)
        self.enqueuer = None
        self._output_signature: Any = None
        # `fit` and `evaluate` reset their iterator before the first step, and what was read until then was a look at
        # the data to build the model. `predict` does not, and need not begin an epoch of the data.
        self._looking = True

    def _get_iterator(self) -> Iterator[Any]:
        batches = self.py_dataset.passes(counted=not self._looking)
        return (self._standardize_batch(batch) for batch in batches)

    def get_tf_dataset(self) -> Any:
        from oomproof._compat.keras import lazy_tensorflow as tf

        stream, adapter = self.py_dataset, weakref.ref(self)
        if self._output_signature is None:
            looks = [self._standardize_batch(batch) for batch in stream.looks()]
            self._output_signature = data_adapter_utils.get_tensor_spec(looks)
        # What tf.data does by itself it does to its own measure of memory.
        options = tf.data.Options()
        options.autotune.enabled = False
        if not stream.by_number:
            read_all = functools.partial(_read_all, adapter)
            dataset = tf.data.Dataset.from_generator(read_all, output_signature=self._output_signature)
            return dataset.prefetch(1).with_options(options)

        # The same passes, read by tf.data's threads instead of ours: a batch has one queue to go through, not two.
        signature = self._output_signature
        specs = tree.flatten(signature)
        types = [spec.dtype for spec in specs]
        read = functools.partial(_read_batch, adapter, specs)
        begin_pass = functools.partial(_begin_pass, adapter, len(stream))
        length, workers, waiting = len(stream), stream.workers, max(1, stream.max_queue_size - 2 * stream.workers)

        def tensors(epoch: Any, batch: Any) -> Any:
            parts = tf.numpy_function(read, [epoch, batch], types)
            for part, spec in zip(parts, specs, strict=True):
                part.set_shape(spec.shape)
            return tree.pack_sequence_as(signature, parts)

        def batches(epoch: Any, start: Any) -> Any:
            numbers = tf.data.Dataset.range(start, length)
            parallel = {"num_parallel_calls": workers, "deterministic": True} if workers else {}
            return numbers.map(lambda batch: tensors(epoch, batch), **parallel).prefetch(waiting)

        def begin(_: Any) -> Any:
            return tuple(tf.numpy_function(begin_pass, [], [tf.int64, tf.int64]))

        return tf.data.Dataset.range(1).map(begin).flat_map(batches).with_options(options)

    def on_epoch_end(self) -> None:
        super().on_epoch_end()
        self._looking = False


# What TensorFlow calls. It keeps functions for as long as the process lives, so none of them holds the data.


def _read_all(adapter: weakref.ref[StreamAdapter]) -> Iterator[Any]:
    found = adapter()
    batches = iter(()) if found is None else found._get_iterator()
    del found
    while True:
        with _inside_tensorflow as going_on:
            batch = next(batches, END) if going_on else END
        if batch is END:
            return
        yield batch


def _begin_pass(adapter: weakref.ref[StreamAdapter], length: int) -> tuple[int, int]:
    """(epoch, its first batch)."""
    found = adapter()
    return (0, length) if found is None else found.py_dataset.begin(counted=not found._looking)


def _read_batch(adapter: weakref.ref[StreamAdapter], specs: list[Any], epoch: Any, batch: Any) -> list[Any]:
    with _inside_tensorflow as going_on:
        found = adapter()
        if not going_on or found is None:
            return [
                np.empty([0 if side is None else side for side in spec.shape], spec.dtype.as_numpy_dtype)
                for spec in specs
            ]
        parts = tree.flatten(found._standardize_batch(found.py_dataset.batch(int(epoch), int(batch))))
    return [np.asarray(part, spec.dtype.as_numpy_dtype) for part, spec in zip(parts, specs, strict=True)]
