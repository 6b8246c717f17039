"""JAX, and how Keras calls a step on it: with all of the model's values as lists, and an iterator.

A batch is pulled here, before the step, so that a step that fails has its batch still.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax
import keras
import numpy as np
from keras import tree

from oomproof._backends.base import RunBatch, Traits
from oomproof._backends.common.keras_functions import (
    FUNCTIONS,
    batch_size_of,
    pulled,
    put_in_place,
    samples_in,
    taken_away,
)
from oomproof._backends.common.model import check_has_no_own_step
from oomproof._backends.common.recompute import recomputing
from oomproof._backends.common.segments import labels
from oomproof._backends.jax.device import JaxMemory
from oomproof._backends.jax.engine import JaxEngine, tracing
from oomproof._backends.jax.gradients import full_batch_gradients
from oomproof._backends.jax.host_batches import can_stay_on_host, fed
from oomproof._backends.jax.state import live_state
from oomproof._backends.jax.step import JaxStep
from oomproof._records.run import Phase
from oomproof._records.trace import Workload
from oomproof._records.units import tensor_bytes
from oomproof._version import __version__


class JaxBackend:
    name = "jax"
    traits = Traits(compiles_by_default=True, measures_peaks=False, prefetches_batch=True, holds_results=True)

    def __init__(self) -> None:
        self._memory: JaxMemory | None = None

    def versions(self) -> dict[str, str]:
        return {"oomproof": __version__, "keras": keras.__version__, "jax": jax.__version__}

    def memory(self) -> JaxMemory:
        # One for all: programs tell it what they need, and whoever asks hears of it.
        self._memory = self._memory or JaxMemory()
        return self._memory

    def check_model(self, model: Any) -> None:
        check_has_no_own_step(model)

    def step(self, model: Any) -> JaxStep:
        return JaxStep(model, self.memory())

    segments = staticmethod(labels)

    def recomputing(self, model: Any, segments: Sequence[str]) -> AbstractContextManager[None]:
        return recomputing(model, segments, JaxEngine(model))

    def install(self, model: Any, run: RunBatch, settle: Callable[[], None]) -> Sequence[str]:
        object.__setattr__(model, "jax_state_sync", functools.partial(_sync, model, settle, threading.get_ident()))
        return put_in_place(model, dict.fromkeys(FUNCTIONS, _on_state), run)

    def reading(self) -> AbstractContextManager[None]:
        return contextlib.nullcontext()  # Batches are pulled here.

    def uninstall(self, model: Any) -> None:
        taken_away(model)
        vars(model).pop("jax_state_sync", None)

    batch_size_of = staticmethod(batch_size_of)
    samples_in = staticmethod(samples_in)

    def as_batch(self, x: Any, y: Any, sample_weight: Any) -> Any:
        return tree.map_structure(
            lambda leaf: leaf if leaf is None else keras.ops.convert_to_tensor(leaf), (x, y, sample_weight)
        )

    def part_of(self, data: Any, start: int, stop: int) -> Any:
        return JaxEngine.take(data, start, stop - start)

    def nothing_written(self, model: Any) -> Any:
        return JaxEngine(model).scope()

    def inside_graph(self) -> bool:
        return tracing()

    own_variables: tuple[type, ...] = ()

    def gradients(
        self, loss_fn: Callable[..., Any], variables: Sequence[Any], data: Any, micro: int | None, has_aux: bool
    ) -> Any:
        return full_batch_gradients(loss_fn, variables, data, micro, has_aux)

    def batch_on_device(self, model: Any, workload: Workload) -> float:
        if not (workload.target.gpu and workload.jit and can_stay_on_host(model)):
            return 1.0
        inputs, targets = (
            sum(tensor_bytes(spec.shape, spec.dtype) for spec in tree.flatten(part) if spec is not None)
            for part in (workload.x, workload.y)
        )
        return targets / max(1, inputs + targets)


def _on_state(model: Any, run: RunBatch, phase: Phase, state: Any, iterator: Iterator[Any]) -> Any:
    live = live_state(model)
    if state is not live.handed_out:
        # A new run or epoch, or a callback has put the values back in between.
        live = live_state(model, anew=True)
        live.attach(phase, state)
    outputs = []
    if phase == "train":
        iterator = fed(model, iterator)
    try:
        for done in range(model.steps_per_execution):
            try:
                data = pulled(iterator)
            except StopIteration:
                if done == 0:
                    raise
                break
            outputs.append(run(phase, data, None))
    except BaseException:
        # The variables hold the truth. What Keras noted before is older, or gone.
        model._jax_state_synced = True
        raise
    if phase == "predict" and len(outputs) > 1:
        outputs = [tree.map_structure(lambda *parts: np.concatenate(parts), *outputs)]
    # Not those from before the run: it may have made the lists anew.
    return outputs[-1], live_state(model).state(phase)


def _sync(model: Any, settle: Callable[[], None], thread: int) -> None:
    """In the place of Keras's jax_state_sync, which puts values back into the model: here they are in it already."""
    noted = [value for values in (getattr(model, "_jax_state", None) or {}).values() for value in values or ()]
    ours = {id(value) for values in live_state(model).handed_out or () for value in values}
    if any(id(value) not in ours for value in noted):
        type(model).jax_state_sync(model)  # A step of the user's own, which is left to Keras.
    elif threading.get_ident() == thread:
        settle()
        model._jax_state_synced = True


@functools.cache
def backend() -> JaxBackend:
    directory = os.environ.get("OOMPROOF_CACHE_DIR")
    if directory and not jax.config.jax_compilation_cache_dir:
        # Compiling is what a retry costs on JAX; programs from an earlier run are then read from disk.
        jax.config.update("jax_compilation_cache_dir", os.path.join(directory, "jax"))
    return JaxBackend()
