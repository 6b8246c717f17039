"""TensorFlow, and how Keras calls a step on it.

Keras hands its train and test functions an iterator, its predict function a list of batches, and the `*_on_batch`
methods a generator. A batch is pulled here, before the step, so that a step that fails has its batch still.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import keras
import tensorflow as tf
from keras import tree

from oomproof._backends.base import RunBatch, Traits
from oomproof._backends.common.keras_functions import batch_size_of, pulled, put_in_place, samples_in, taken_away
from oomproof._backends.common.model import check_has_no_own_step
from oomproof._backends.common.recompute import recomputing
from oomproof._backends.common.segments import labels
from oomproof._backends.tensorflow.device import SEARCH_SHARE, TensorFlowMemory
from oomproof._backends.tensorflow.engine import TensorFlowEngine, as_tensors
from oomproof._backends.tensorflow.gradients import full_batch_gradients
from oomproof._backends.tensorflow.pieces import take
from oomproof._backends.tensorflow.step import TensorFlowStep
from oomproof._backends.tensorflow.writes import PendingWrites
from oomproof._records.run import Phase
from oomproof._records.trace import Workload
from oomproof._version import __version__
from oomproof.errors import UnsupportedModelError

# Asked for in every step and slow to compute.
_specs: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
_same_specs: dict[str, Any] = {}


class TensorFlowBackend:
    name = "tensorflow"
    traits = Traits(
        uncompiled_mode="graph",
        compiles_on_gpu_only=True,
        offers_xla=True,
        update_waits=True,
        sparse_gradients=True,
        search_share=SEARCH_SHARE,
    )

    def versions(self) -> dict[str, str]:
        return {"oomproof": __version__, "keras": keras.__version__, "tensorflow": tf.__version__}

    def memory(self) -> TensorFlowMemory:
        return TensorFlowMemory()

    def check_model(self, model: Any) -> None:
        check_has_no_own_step(model)
        strategy = model._distribute_strategy
        if strategy is not None or tf.distribute.has_strategy():
            name = type(strategy or tf.distribute.get_strategy()).__name__
            raise UnsupportedModelError(
                f"The model belongs to a tf.distribute strategy ({name}). oomproof does not support training on "
                "several devices yet, and would give wrong results. Build and guard the model outside of "
                "`strategy.scope()` to train on one device."
            )

    def step(self, model: Any) -> TensorFlowStep:
        return TensorFlowStep(model)

    segments = staticmethod(labels)

    def recomputing(self, model: Any, segments: Sequence[str]) -> AbstractContextManager[None]:
        compiled = bool(model.jit_compile) and not model.run_eagerly
        return recomputing(model, segments, TensorFlowEngine(model, static=compiled))

    def install(self, model: Any, run: RunBatch, settle: Callable[[], None]) -> Sequence[str]:
        return put_in_place(model, {"train": _on_iterator, "test": _on_iterator, "predict": _on_list}, run)

    def reading(self) -> AbstractContextManager[None]:
        return contextlib.nullcontext()  # Batches are pulled here.

    def uninstall(self, model: Any) -> None:
        taken_away(model)

    batch_size_of = staticmethod(batch_size_of)
    samples_in = staticmethod(samples_in)

    def as_batch(self, x: Any, y: Any, sample_weight: Any) -> Any:
        return as_tensors((x, y, sample_weight))

    def part_of(self, data: Any, start: int, stop: int) -> Any:
        return take(data, start, stop - start)

    def nothing_written(self, model: Any) -> PendingWrites:
        return PendingWrites(model.trainable_variables)

    def inside_graph(self) -> bool:
        return not tf.executing_eagerly()

    own_variables = (tf.Variable,)

    def gradients(
        self, loss_fn: Callable[..., Any], variables: Sequence[Any], data: Any, micro: int | None, has_aux: bool
    ) -> Any:
        return full_batch_gradients(loss_fn, variables, data, micro, has_aux)

    def batch_on_device(self, model: Any, workload: Workload) -> float:
        # XLA's programs take whole batches. On a CPU the host's memory is what there is.
        return 0.0 if workload.target.gpu and not workload.jit else 1.0


def _on_iterator(model: Any, run: RunBatch, phase: Phase, iterator: Iterator[Any]) -> Any:
    logs = None
    spec = _spec_of(iterator)
    for done in range(model.steps_per_execution):
        try:
            data = as_tensors(pulled(iterator))
        except StopIteration:
            if done == 0:
                raise
            break
        logs = run(phase, data, spec)
    return logs


def _on_list(model: Any, run: RunBatch, phase: Phase, batches: Sequence[Any]) -> Any:
    outputs = [run(phase, as_tensors(batch), None) for batch in batches]
    if len(outputs) == 1:
        return outputs[0]
    return tree.map_structure(lambda *parts: tf.concat(parts, axis=0), *outputs)


def _spec_of(iterator: Iterator[Any]) -> Any:
    """How Keras traces what the iterator yields: with sizes that may change left open."""
    if not isinstance(iterator, tf.data.Iterator):
        return None
    if iterator not in _specs:
        spec = tree.map_structure(
            lambda leaf: None if leaf is None or isinstance(leaf, tf.OptionalSpec) else leaf, iterator.element_spec
        )
        # Every epoch has a new iterator: one object for all specs that are the same.
        _specs[iterator] = _same_specs.setdefault(repr(spec), spec)
    return _specs[iterator]


@functools.cache
def backend() -> TensorFlowBackend:
    return TensorFlowBackend()
