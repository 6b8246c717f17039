"""The engine for the device at hand: real steps at small batch sizes, measured, and a straight line through them.

Peaks are close to linear in the batch size. The line goes through the smallest and the largest size that were run; the
one in between says how straight it is. Where the line says that the batch itself may fit, that is run too, and what was
measured is the answer. Weights, optimizer and metrics are put back as they were.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
from keras import tree

from oomproof import _simulators as simulators
from oomproof._estimation.engines.base import Answer, Question
from oomproof._machine import gpus
from oomproof._records.trace import Spec
from oomproof.errors import CannotFitError

# Shares of the batch that are run, and the fewest samples that are worth running.
_SHARES = (1 / 8, 1 / 4, 1 / 2)
_LEAST = 2
# One that is forgotten, and two that count: what a step leaves behind is there in the next.
_STEPS = 3


def why_not(question: Question) -> str | None:
    memory = question.backend.memory()
    here = gpus.local()
    if not memory.describe().measurable or memory.usage() is None:
        return "it runs small steps on the device at hand, and the memory of that one cannot be measured"
    if question.gpu != here:
        return f"it runs small steps on the device at hand, {memory.describe()}, which is not the one asked about"
    if not question.backend.traits.measures_peaks:
        return 'JAX does not tell the peak of a step; XLA plans it, and engine="compile" asks XLA'
    if question.workload.recompute:
        return "it runs the model as it is, and segments of it were to be recomputed"
    return None


def answer(question: Question) -> Answer:
    trace = simulators.trace(question.backend, question.model, question.workload)
    batch_size = _samples(question.workload.x)
    sizes = sorted({max(_LEAST, int(batch_size * share)) for share in _SHARES})
    sizes = [size for size in sizes if size < batch_size] or [batch_size]
    peaks: list[int] = []
    memory = question.backend.memory().describe()
    with _put_back(question.model):
        for size in sizes:
            peak = _peak(question, size)
            if peak is None:
                break
            peaks.append(peak)
        tried = _may_fit(sizes, peaks, batch_size, memory.limit)
        whole = _peak(question, batch_size) if tried else None
    if not peaks:
        raise CannotFitError(
            f"Not even {sizes[0]} of {batch_size} samples fit on {memory}, so nothing "
            'could be measured. Ask with engine="trace", which runs nothing.'
        )
    sizes = sizes[: len(peaks)]
    expected, doubt = _line(sizes, peaks, batch_size)
    notes = [f"ran real steps with batches of {', '.join(map(str, sizes))} on {memory}"]
    if batch_size in sizes:
        doubt = 0
    elif whole is not None:
        expected, doubt = whole, 0
        notes = [f"ran the step itself on {memory}"]
    elif tried:
        # It is more than there is, whatever the line says.
        expected = max(expected, (memory.limit or 0) + 1)
        notes.append(f"a batch of {batch_size} ran out of memory")
    return Answer(
        trace,
        peak=int(expected),
        measured=whole is not None or batch_size in sizes,
        unknown=(int(doubt), int(doubt)),
        notes=tuple(notes),
    )


def _may_fit(sizes: list[int], peaks: list[int], batch_size: int, limit: int | None) -> bool:
    """Whether it is worth trying the batch itself."""
    if limit is None or len(peaks) < len(sizes) or batch_size in sizes:
        return False
    expected, doubt = _line(sizes, peaks, batch_size)
    return expected - doubt <= limit


def _peak(question: Question, size: int) -> int | None:
    """Bytes at the peak of steps of that size, or `None` where they do not fit.

    They are run by Keras's own loops: `train_on_batch` moves a batch to the device once, `fit` does so where it is
    used, which can be more than once.
    """
    model, memory, phase = question.model, question.backend.memory(), question.workload.phase
    x, y = (_data(part, size) for part in (question.workload.x, question.workload.y))
    # TensorFlow's datasets take lists for tensors.
    batches = _Repeated(tree.lists_to_tuples((x,) if phase == "predict" else (x, y)))
    loop = {"train": model.fit, "test": model.evaluate, "predict": model.predict}[phase]
    # Keras leaves cycles behind that hold tensors; those of another size have no place in this one's peak.
    gc.collect()
    memory.release()
    memory.reset_peak()
    try:
        loop(batches, verbose=0, callbacks=[_FirstStepForgotten(memory)])
    except Exception as error:
        if memory.shortage(error) is None:
            raise
        return None
    use = memory.usage()
    assert use is not None
    return use.peak


class _Repeated(keras.utils.PyDataset):  # type: ignore[misc]  # Keras is seen as untyped.
    """The same batch a few times, from the host."""

    def __init__(self, batch: tuple[Any, ...]) -> None:
        super().__init__()
        self._batch = batch

    def __len__(self) -> int:
        return _STEPS

    def __getitem__(self, index: int) -> Any:
        return self._batch


class _FirstStepForgotten(keras.callbacks.Callback):  # type: ignore[misc]  # Keras is seen as untyped.
    """The first step at a size looks for kernels and makes what is made once; the others are like all that follow."""

    def __init__(self, memory: Any) -> None:
        super().__init__()
        self._memory = memory
        self._forgotten = False

    def _after(self, step: int) -> None:
        # A model may be told to run several steps at a time: the last one has to count in any case.
        if not self._forgotten and step + 1 < _STEPS:
            self._forgotten = True
            self._memory.reset_peak()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._after(batch)

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        self._after(batch)

    def on_predict_batch_end(self, batch: int, logs: Any = None) -> None:
        self._after(batch)


def _line(sizes: list[int], peaks: list[int], batch_size: int) -> tuple[float, float]:
    """What the line says of the batch, and by how much the point in the middle says something else."""
    if len(sizes) == 1:
        # Without a second point: all of it might grow with the batch.
        return peaks[0] * batch_size / sizes[0], 0.0
    expected = _through(sizes[0], peaks[0], sizes[-1], peaks[-1], batch_size)
    if len(sizes) < 3:
        return expected, 0.0
    upper = _through(sizes[1], peaks[1], sizes[2], peaks[2], batch_size)
    return expected, abs(upper - expected)


def _through(a: int, at_a: int, b: int, at_b: int, x: int) -> float:
    return at_b + (at_b - at_a) / (b - a) * (x - b)


def _data(specs: Any, size: int) -> Any:
    def some(spec: Spec | None) -> Any:
        # Zero is a valid number of a class, a word or a pixel.
        return None if spec is None else np.zeros((size, *spec.shape[1:]), spec.dtype)

    return tree.map_structure(some, specs)


def _samples(specs: Any) -> int:
    return int(next(leaf for leaf in tree.flatten(specs) if leaf is not None).shape[0])


@contextlib.contextmanager
def _put_back(model: Any) -> Iterator[None]:
    """Whatever steps write, copied to the host before and back afterwards."""
    history, stopped = getattr(model, "history", None), getattr(model, "stop_training", False)
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None and not optimizer.built:
        optimizer.build(model.trainable_variables)
    variables = [*model.variables, *(optimizer.variables if optimizer is not None else ()), *model.metrics_variables]
    before = [np.array(keras.ops.convert_to_numpy(variable)) for variable in variables]
    try:
        yield
    finally:
        for variable, value in zip(variables, before, strict=True):
            variable.assign(value)
        model.history, model.stop_training = history, stopped
