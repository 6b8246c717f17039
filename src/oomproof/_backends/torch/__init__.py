"""torch, and how Keras calls a step on it: with a list that holds one batch, which Keras has pulled itself."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import keras
import numpy as np
import torch
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
from oomproof._backends.common.model import check_has_no_own_step, layers
from oomproof._backends.common.recompute import recomputing
from oomproof._backends.common.segments import labels
from oomproof._backends.torch import expandable
from oomproof._backends.torch.device import TorchMemory
from oomproof._backends.torch.engine import TorchEngine, take
from oomproof._backends.torch.gradients import full_batch_gradients
from oomproof._backends.torch.step import TorchStep
from oomproof._compat.torch import EPOCH_ITERATOR, RUNS_SEVERAL_STEPS, is_distributed
from oomproof._records.run import Phase
from oomproof._records.trace import Workload
from oomproof._version import __version__
from oomproof.errors import UnsupportedModelError


class TorchBackend:
    name = "torch"
    traits = Traits(
        compiles_each_size=False,
        traces_are_exact=True,
        pieces_wait_on_host=True,
        gradients_add_in_place=True,
        updates_at_once=True,
    )

    def versions(self) -> dict[str, str]:
        return {"oomproof": __version__, "keras": keras.__version__, "torch": torch.__version__}

    def memory(self) -> TorchMemory:
        return TorchMemory()

    def check_model(self, model: Any) -> None:
        check_has_no_own_step(model)
        if is_distributed(model):
            raise UnsupportedModelError(
                "torch.distributed is initialised, so Keras trains this model in several processes. oomproof does not "
                "support that yet: one that runs out of memory would leave the others waiting. Train it without "
                "`guard`, or in one process."
            )
        wrappers = [layer for layer in layers(model) if isinstance(layer, keras.layers.TorchModuleWrapper)]
        for layer in wrappers:
            for module in layer.modules():
                if type(module).__name__ in ("DistributedDataParallel", "FullyShardedDataParallel"):
                    raise UnsupportedModelError(
                        f"Layer {layer.name!r} holds a torch {type(module).__name__}. oomproof does not support "
                        "training in several processes yet: one that runs out of memory would leave the others "
                        "waiting. Guard the model without it to train in one process."
                    )

    def step(self, model: Any) -> TorchStep:
        return TorchStep(model)

    segments = staticmethod(labels)

    def recomputing(self, model: Any, segments: Sequence[str]) -> AbstractContextManager[None]:
        return recomputing(model, segments, TorchEngine(model))

    def install(self, model: Any, run: RunBatch, settle: Callable[[], None]) -> Sequence[str]:
        expandable.let_grow()
        if model.steps_per_execution > 1 and not RUNS_SEVERAL_STEPS:
            # Keras has its own error for that, and raises it where it finds no function.
            self.uninstall(model)
            return tuple(FUNCTIONS)
        return put_in_place(model, dict.fromkeys(FUNCTIONS, _on_list), run)

    def reading(self) -> AbstractContextManager[None]:
        # Keras pulls the batches, with an iterator that it makes in every call of `fit`.
        return EPOCH_ITERATOR.to(lambda kind, *args, **kwargs: _saying_where(kind)(*args, **kwargs))

    def uninstall(self, model: Any) -> None:
        taken_away(model)

    batch_size_of = staticmethod(batch_size_of)
    samples_in = staticmethod(samples_in)

    def as_batch(self, x: Any, y: Any, sample_weight: Any) -> Any:
        return _as_arrays((x, y, sample_weight))

    def part_of(self, data: Any, start: int, stop: int) -> Any:
        return take(data, start, stop - start)

    @contextlib.contextmanager
    def nothing_written(self, model: Any) -> Iterator[None]:
        engine = TorchEngine(model)
        with torch.no_grad(), engine.outside.unchanged_on_failure(keep=False), engine.scope():
            yield

    def inside_graph(self) -> bool:
        return bool(torch.compiler.is_compiling())

    own_variables = (torch.Tensor,)

    def gradients(
        self, loss_fn: Callable[..., Any], variables: Sequence[Any], data: Any, micro: int | None, has_aux: bool
    ) -> Any:
        return full_batch_gradients(loss_fn, variables, _as_arrays(data), micro, has_aux)

    def batch_on_device(self, model: Any, workload: Workload) -> float:
        return 0.0  # Pieces are moved one by one.


def _on_list(model: Any, run: RunBatch, phase: Phase, batches: Sequence[Any]) -> Any:
    results = [run(phase, _as_arrays(batch), None) for batch in batches]
    if phase != "predict" or len(results) == 1:
        return results[-1]
    return tree.map_structure(lambda *parts: torch.cat(parts), *results)


def _as_arrays(data: Any) -> Any:
    """Anything with rows as a tensor or as an array. Arrays go to the device in the step, where that may fail."""

    def convert(leaf: Any) -> Any:
        return leaf if leaf is None or isinstance(leaf, torch.Tensor | np.ndarray) else np.asarray(leaf)

    return tree.map_structure(convert, data)


@functools.cache
def _saying_where(epoch_iterator: type) -> type:
    """Keras's own kind of iterator, which says where an error came from when a batch could not be read."""

    class SayingWhere(epoch_iterator):  # type: ignore[misc]
        def __next__(self) -> Any:
            return pulled(iter(super().__next__, None))

    return SayingWhere


@functools.cache
def backend() -> TorchBackend:
    return TorchBackend()
