"""The proof, on a built and compiled model: a few real samples through one step, plain and as it is to be run.

Both are functions from old values to new ones, so nothing is written. See `proof` for how they are compared.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

import keras
import numpy as np
from keras import ops, tree

from oomproof._backends.common import proof
from oomproof._backends.common.draws import Rows
from oomproof._backends.common.model import layers, mixing_losses
from oomproof._records.exactness import Exactness
from oomproof._records.patience import look_at_the_clock


class StepValues(NamedTuple):
    """What a training step would write.

    Attributes:
        gradients: One for each trainable weight, dense; `None` where there is none. Empty without weights to train.
        written: (variable, new value) of everything the step writes.
        logs: What Keras would show.
    """

    gradients: list[Any]
    written: list[tuple[Any, Any]]
    logs: Any


class Provable(Protocol):
    """A step whose new values can be looked at."""

    model: Any
    engine: Any
    recompute: tuple[str, ...]

    def batch_size(self, data: Any) -> int: ...

    def step_values(self, data: Any, pieces: int) -> StepValues:
        """New values of a training step on a few samples, written nowhere."""


class Comparison(NamedTuple):
    """A plain step beside the one in question, by the names of what they write."""

    asked: proof.Values
    made: proof.Values
    disagreements: tuple[proof.Disagreement, ...]


def proven(step: Provable, data: Any, samples: int, cut: bool) -> Exactness:
    """Whether a step in pieces (`cut`), with what is recomputed now, gives what the plain one gives on some samples."""
    chosen = proof.spread(step.batch_size(data), samples)
    if cut and len(chosen) < 2:
        return Exactness("not exact", ("a batch of one sample cannot show what cutting changes",))
    few = step.engine.pick(data, chosen)
    found = compared(step, few, _unequal_pieces(len(chosen)) if cut else 1).disagreements
    if found:
        own = mixing_losses(step.model) if cut else []
        hint = f"{', '.join(own)} may use more than it is given, such as a tensor that `call` kept"
        return Exactness("not exact", (f"{_way(step, cut)}, {proof.summary(found)}", *([hint] if own else [])))
    other = step.engine.other_numbers() if cut else ()
    return Exactness("exact but for random numbers", tuple(other)) if other else Exactness()


def _unequal_pieces(samples: int) -> int:
    """Into how many pieces samples are cut such that these are not all of one size, if that can be.

    Pieces of one size do not show whether each has the right share.
    """
    return max(2, (samples + 1) // 2)


def compared(step: Provable, data: Any, pieces: int) -> Comparison:
    """The plain step on a small batch and the same in pieces, and in what they differ by more than rounding."""
    names = _names(step.model)
    # Copies, since some frameworks write in place.
    before = {
        name: np.array(_array(variable._value)) for variable, name in names.values() if variable._value is not None
    }
    tolerated = epsilon(step.model, step.engine)
    began = time.monotonic()
    with _plain(step.engine):
        asked = _named(step, names, step.step_values(data, 1))
    # The step in question takes as long at least.
    look_at_the_clock(ahead=time.monotonic() - began)
    with emulating(step.engine):
        made = _named(step, names, step.step_values(data, pieces))
    # With no rounding seen, less passes for rounding: only what differs like this is worth another step.
    found = proof.disagreements(asked, made, asked, before, tolerated)
    if found:
        order = proof.other_order(step.batch_size(data))
        with (
            _plain(step.engine),
            emulating(step.engine),
            step.engine.drawing(Rows.of(order, len(order)), whole=True),
        ):
            reordered = _named(step, names, step.step_values(step.engine.pick(data, order), 1))
        found = proof.disagreements(asked, made, reordered, before, tolerated)
    return Comparison(asked, made, found)


@contextlib.contextmanager
def _plain(engine: Any) -> Iterator[None]:
    """Nothing is recomputed."""
    recomputed, engine.recompute = engine.recompute, ()
    try:
        yield
    finally:
        engine.recompute = recomputed


def epsilon(model: Any, engine: Any) -> float:
    """Machine epsilon of the coarsest type the model computes in, as coarsely as its device does that."""
    kinds = {layer.compute_dtype for layer in layers(model)} & {"float16", "bfloat16", "float32", "float64"}
    quantised = any(getattr(layer.dtype_policy, "quantization_mode", None) for layer in layers(model))
    if quantised or kinds & {"bfloat16"}:
        return 2.0**-7
    if kinds & {"float16"}:
        return 2.0**-10
    # Off TensorFlow, Keras computes in single precision even where it is asked for double.
    double = kinds == {"float64"} and keras.backend.result_type("float64", "float64") == "float64"
    if double:
        return float(np.finfo("float64").eps)
    return proof.TENSOR_FLOAT if engine.multiplies_coarsely else float(np.finfo("float32").eps)


@contextlib.contextmanager
def emulating(engine: Any) -> Iterator[None]:
    """Pieces take the whole batch's random numbers, made at once where nothing better can be done: samples are few."""
    engine.draws_whole = True
    try:
        yield
    finally:
        engine.draws_whole = False


def _way(step: Provable, cut: bool) -> str:
    ways = (["in pieces"] if cut else []) + (["recomputed"] if step.recompute else [])
    return " and ".join(ways)


def _names(model: Any) -> dict[int, tuple[Any, str]]:
    """Every variable a step may write, with a name that no other has."""
    optimizer = [] if model.optimizer is None else model.optimizer.variables
    found: dict[int, tuple[Any, str]] = {}
    taken: set[str] = set()
    for variable in [*model.variables, *optimizer, *model.metrics_variables]:
        if id(variable) not in found:
            path = variable.path
            name = path if path not in taken else f"{path} ({len(found)})"
            taken.add(name)
            found[id(variable)] = variable, name
    return found


def _named(step: Provable, names: dict[int, tuple[Any, str]], values: StepValues) -> dict[str, Any]:
    weights = step.model.trainable_weights if values.gradients else []
    named = {
        f"{proof.GRADIENT}{names[id(variable)][1]}": _array(gradient)
        for variable, gradient in zip(weights, values.gradients, strict=True)
        if not getattr(variable, "overwrite_with_gradient", False)
    }
    for variable, value in values.written:
        _, name = names.get(id(variable), (variable, variable.path))
        named[name] = _array(value)
    logs = tree.flatten_with_path(values.logs) if tree.is_nested(values.logs) else [(("loss",), values.logs)]
    return named | {f"log {'/'.join(map(str, path))}": _array(value) for path, value in logs}


def _array(value: Any) -> Any:
    if value is None:
        return None
    array = np.asarray(ops.convert_to_numpy(value))
    # NumPy knows nothing of bfloat16 and loses much in float16.
    return array.astype("float32") if array.dtype.itemsize == 2 and array.dtype.kind not in "iu" else array
