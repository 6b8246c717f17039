"""The engine for the device at hand: real steps at small batch sizes, measured, and a straight line through them.

Peaks are close to linear in the batch size. The line goes through the smallest and the largest size that were run; the
one in between says how straight it is. Where the line says that the batch itself fits with room to spare, that is run
too, and what was measured is the answer. Weights, optimizer and metrics are put back as they were.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
from keras import tree

from oomproof import devices
from oomproof.errors import CannotFitError
from oomproof.estimation.engines import Answer, Question
from oomproof.tracing import Spec

# Shares of the batch that are run, and the fewest samples that are worth running.
_SHARES = (1 / 8, 1 / 4, 1 / 2)
_LEAST = 2
# The share of what is there below which the batch itself is run.
_SURELY_FITS = 0.8
# The first step at a size chooses algorithms and makes what is made once; the second is like all that follow.
_STEPS = 2


def why_not(question: Question) -> str | None:
    memory = question.backend.memory()
    here = devices.local()
    if not memory.describe().measurable or memory.usage() is None:
        return "it runs small steps on the device at hand, and the memory of that one cannot be measured"
    if question.gpu != here:
        return f"it runs small steps on the device at hand, {memory.describe()}, which is not the one asked about"
    if question.backend.name == "jax":
        return 'JAX does not tell the peak of a step; XLA plans it, and engine="compile" asks XLA'
    if question.workload.recompute:
        return "it runs the model as it is, and stretches of it were to be recomputed"
    return None


def answer(question: Question) -> Answer:
    trace = question.backend.trace(question.model, question.workload)
    batch_size = _samples(question.workload.x)
    sizes = sorted({max(_LEAST, int(batch_size * share)) for share in _SHARES})
    sizes = [size for size in sizes if size < batch_size] or [batch_size]
    peaks: list[int] = []
    with _put_back(question.model):
        for size in sizes:
            peak = _peak(question, size)
            if peak is None:
                break
            peaks.append(peak)
        whole = _whole(question, sizes, peaks, batch_size)
    if not peaks:
        raise CannotFitError(
            f"Not even {sizes[0]} of {batch_size} samples fit on {question.backend.memory().describe()}, so nothing "
            'could be measured. Ask with engine="trace", which runs nothing.'
        )
    sizes = sizes[: len(peaks)]
    expected, doubt = _line(sizes, peaks, batch_size) if whole is None else (whole, 0)
    run = ", ".join(map(str, sizes if whole is None else [*sizes, batch_size]))
    return Answer(
        trace,
        peak=int(expected),
        unknown=(int(doubt), int(doubt)),
        notes=(*trace.notes, f"real steps were run with batches of {run} on {question.backend.memory().describe()}"),
    )


def _whole(question: Question, sizes: list[int], peaks: list[int], batch_size: int) -> int | None:
    """The peak of the batch itself, or `None` where it might not fit."""
    limit = question.backend.memory().describe().limit
    if limit is None or len(peaks) < len(sizes) or sizes[-1] >= batch_size:
        return None
    expected, doubt = _line(sizes, peaks, batch_size)
    return _peak(question, batch_size) if expected + doubt < _SURELY_FITS * limit else None


def _peak(question: Question, size: int) -> int | None:
    """Bytes at the peak of steps of that size, or `None` where they do not fit."""
    model, memory, phase = question.model, question.backend.memory(), question.workload.phase
    x, y = (_data(part, size) for part in (question.workload.x, question.workload.y))
    memory.release()
    memory.reset_peak()
    steps = {
        "train": model.train_on_batch,
        "test": model.test_on_batch,
        "predict": lambda x, _: model.predict_on_batch(x),
    }
    try:
        for _ in range(_STEPS):
            steps[phase](x, y)
    except Exception as error:
        if memory.shortage(error) is None:
            raise
        return None
    use = memory.usage()
    assert use is not None
    return use.peak


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
