"""Where batches are when a step begins.

Keras puts whole batches on a GPU, this one and the next, before it calls a step. A batch that runs in pieces need not
be there: it stays in memory of the host that the GPU can read, and the program takes piece after piece from it. So
batches are read here, in the place of the iterator that Keras would have put them on the device with.
"""

from __future__ import annotations

import inspect
import itertools
import weakref
from collections.abc import Iterator
from types import GeneratorType
from typing import Any, NamedTuple

import jax
import keras
import numpy as np
from keras import tree

from oomproof._backends.common.batch import batch_leaves
from oomproof._backends.common.model import overrides, unpack
from oomproof._compat.jax import BATCHES_AHEAD

_feeds: weakref.WeakKeyDictionary[Any, Feed] = weakref.WeakKeyDictionary()
_wanted: weakref.WeakKeyDictionary[Any, Wanted] = weakref.WeakKeyDictionary()
# Models whose batches the host has no such memory for.
_refused: weakref.WeakSet[Any] = weakref.WeakSet()


class Wanted(NamedTuple):
    """Where the batches of a model are to be, by its largest so far. Smaller ones, such as the last, say nothing."""

    from_host: bool
    samples: int


class Feed:
    """The batches of an epoch, each put in its place while the one before it is trained on, as Keras does it.

    Args:
        model: The model that is trained.
        batches: The same as the data gives them, on the host.
    """

    def __init__(self, model: Any, batches: Iterator[Any]) -> None:
        self._model = weakref.ref(model)
        self._batches = iter(batches)
        self._ahead: list[Any] = []
        # How a model's batches will run is not known before it has seen one. That one takes nothing from the device.
        self._looks_ahead = model in _wanted
        _wanted.setdefault(model, Wanted(from_host=True, samples=0))

    def __iter__(self) -> Feed:
        return self

    def __next__(self) -> Any:
        batch = self._ahead.pop() if self._ahead else self._placed(next(self._batches))
        if self._looks_ahead:
            self._ahead.extend(map(self._placed, itertools.islice(self._batches, 1)))
        self._looks_ahead = True
        return batch

    def _placed(self, batch: Any) -> Any:
        model = self._model()
        try:
            return batch if model is None else placed(batch, _wanted[model].from_host)
        except (jax.errors.JaxRuntimeError, ValueError):
            return batch  # There is no room for it: the step will see that, who can do something about it.


def fed(model: Any, iterator: Iterator[Any]) -> Iterator[Any]:
    """Batches for the training of a model, from the iterator that Keras hands over."""
    if not isinstance(iterator, GeneratorType) or not can_stay_on_host(model):
        return iterator
    if iterator not in _feeds:
        begun = inspect.getgeneratorstate(iterator) != inspect.GEN_CREATED
        if (
            begun
            or BATCHES_AHEAD is None
            or iterator.gi_code is not BATCHES_AHEAD.__code__
            or iterator.gi_frame is None
        ):
            return iterator
        source = iterator.gi_frame.f_locals.get("numpy_iterator")
        if source is None:
            return iterator
        _feeds[iterator] = Feed(model, source)
    return _feeds[iterator]


def can_stay_on_host(model: Any) -> bool:
    """Whether a compiled step can take a model's inputs piece by piece, and nobody wants to see all of them at once."""
    compiled = model.jit_compile and not model.run_eagerly
    reads_inputs = any(overrides(model, method) for method in ("compute_loss", "compute_metrics"))
    known = hasattr(jax, "memory") and model not in _refused
    return bool(compiled) and known and not reads_inputs and keras.distribution.distribution() is None


def batches_on_device(model: Any) -> int:
    """How many batches are on the device when a step begins: none that stay on the host, or this one and the next."""
    return 0 if model in _wanted and _wanted[model].from_host else 2


def where_wanted(model: Any, data: Any, from_host: bool) -> Any:
    """A batch in its place, and those that follow will be there at once. What is on the device stays there."""
    inputs = batch_leaves(unpack(data)[0])
    samples = inputs[0].shape[0]
    if model in _wanted and samples >= _wanted[model].samples:
        _wanted[model] = Wanted(from_host, samples)
    if from_host and all(map(is_on_host, inputs)):
        try:
            return placed(data, from_host=True)
        except (jax.errors.JaxRuntimeError, ValueError):
            # No more memory of that kind on the host. It is no shortage of the device, and pieces would not help.
            _refused.add(model)
            _wanted[model] = Wanted(False, samples)
    return placed(data, from_host=False)


def placed(data: Any, from_host: bool) -> Any:
    """A batch on the device, or with its inputs in memory of the host that the device can read."""
    x, y, sample_weight = unpack(data)
    x = tree.map_structure(_to_host if from_host and is_dense(x) else to_device, x)
    y, sample_weight = (tree.map_structure(to_device, part) for part in (y, sample_weight))
    return (x,) if y is None and sample_weight is None else (x, y) if sample_weight is None else (x, y, sample_weight)


def is_dense(x: Any) -> bool:
    return all(isinstance(leaf, jax.Array | np.ndarray) for leaf in batch_leaves(x))


def is_on_host(leaf: Any) -> bool:
    """Whether an array, or what stands for it in a trace, is in the host's memory."""
    if not isinstance(leaf, jax.Array):
        return isinstance(leaf, np.ndarray)
    return hasattr(jax, "memory") and getattr(jax.typeof(leaf), "memory_space", None) == jax.memory.Space.Host


def to_device(leaf: Any) -> Any:
    if leaf is None or (isinstance(leaf, jax.Array) and not is_on_host(leaf)):
        return leaf
    return jax.device_put(leaf, jax.memory.Space.Device) if isinstance(leaf, jax.Array) else jax.device_put(leaf)


def _to_host(leaf: Any) -> Any:
    if leaf is None or (isinstance(leaf, jax.Array) and is_on_host(leaf)):
        return leaf
    device = jax.local_devices()[0]
    return jax.device_put(leaf, jax.sharding.SingleDeviceSharding(device, memory_kind="pinned_host"))
