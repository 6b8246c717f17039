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

_IN_ORDER = "the model depends on the order of the samples in a batch, or draws random numbers past keras.random"
# Variables with a name for each, by identity.
_Names = dict[int, tuple[Any, str]]


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
    head: tuple[str, int] | None

    def batch_size(self, data: Any) -> int: ...

    def step_values(self, data: Any, pieces: int) -> StepValues:
        """New values of a training step on a few samples, written nowhere."""


class Comparison(NamedTuple):
    """A plain step beside the one in question, by the names of what they write.

    Attributes:
        any_order: Whether the plain step is not known to depend on the order of its samples.
    """

    asked: proof.Values
    made: proof.Values
    disagreements: tuple[proof.Disagreement, ...]
    any_order: bool = True


def proven(step: Provable, data: Any, samples: int, cut: bool) -> Exactness:
    """Whether a step in pieces (`cut`), with what is recomputed now, gives what the plain one gives on some samples."""
    chosen = proof.spread(step.batch_size(data), samples)
    if cut and len(chosen) < 2:
        return Exactness("not exact", ("a batch of one sample cannot show what cutting changes",))
    few = step.engine.pick(data, chosen)
    comparison = compared(step, few, _unequal_pieces(len(chosen)) if cut else 1)
    if found := comparison.disagreements:
        own = mixing_losses(step.model) if cut else []
        hints = [f"{', '.join(own)} may use more than it is given, such as a tensor that `call` kept"] if own else []
        hints += [] if comparison.any_order else [_IN_ORDER]
        return Exactness("not exact", (f"{_way(step, cut)}, {proof.summary(found)}", *hints))
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
        name: np.array(as_array(variable._value)) for variable, name in names.values() if variable._value is not None
    }
    tolerated = epsilon(step.model, step.engine)
    owners = _owners(step.model.optimizer, names)
    began = time.monotonic()
    with _plain(step.engine), emulating(step.engine):
        asked = _named(step, names, step.step_values(data, 1))
    # The step in question takes as long at least.
    took = time.monotonic() - began
    look_at_the_clock(ahead=took)
    with emulating(step.engine):
        made = _named(step, names, step.step_values(data, pieces))
    # With no rounding seen, less passes for rounding: only what differs like this is worth another step, and only what
    # differs still is worth a third.
    found = proof.disagreements(asked, made, (), before, tolerated, owners)
    any_order = True
    if found:
        look_at_the_clock(ahead=took)
        with _plain(step.engine), emulating(step.engine):
            shaken = _shaken(step, names, data, tolerated)
        others = [proof.nearer(asked, shaken)]
        found = proof.disagreements(asked, made, others, before, tolerated, owners)
    if found:
        look_at_the_clock(ahead=took)
        with _plain(step.engine), emulating(step.engine):
            reordered = _reordered(step, names, data)
        # Where the order of samples makes more of a difference than rounding, it is part of what is computed.
        any_order = proof.is_rounding(asked, reordered, shaken, tolerated)
        if any_order:
            found = proof.disagreements(asked, made, [*others, reordered], before, tolerated, owners)
    return Comparison(asked, made, found, any_order)


def _reordered(step: Provable, names: _Names, data: Any) -> proof.Values:
    """The plain step with its samples in another order: sums over samples are rounded in another way."""
    order = proof.other_order(step.batch_size(data))
    with step.engine.drawing(Rows.of(order, len(order)), whole=True):
        return _named(step, names, step.step_values(step.engine.pick(data, order), 1))


def _shaken(step: Provable, names: _Names, data: Any, epsilon: float) -> proof.Values:
    """The plain step with weights that are off by as much as rounding makes of them.

    The order of samples does not show how each of them is rounded: kernels do that differently for other numbers of
    samples, and a unit may then work that did not.
    """
    rng = np.random.default_rng(0)

    def shaken(value: Any) -> Any:
        # Half of what numbers are apart, but not less than what the weight's own are.
        own = epsilon if value.dtype.itemsize < 4 else float(np.finfo(value.dtype).eps)
        off = 1 + max(epsilon / 2, own) * rng.choice((-1.0, 1.0), size=value.shape)
        return (value.astype(float) * off).astype(value.dtype)

    with step.engine.changed([v for v in step.model.trainable_weights if _is_ordinary(v)], shaken):
        found = _named(step, names, step.step_values(data, 1))
    # Weights that began elsewhere end elsewhere.
    moved = {names[id(variable)][1] for variable in step.model.trainable_weights}
    return {name: value for name, value in found.items() if name not in moved}


def _is_ordinary(weight: Any) -> bool:
    own = getattr(weight, "overwrite_with_gradient", False) or weight._value is None
    return keras.backend.is_float_dtype(weight.dtype) and not own


@contextlib.contextmanager
def _plain(engine: Any) -> Iterator[None]:
    """Nothing is recomputed, and the head runs with the rest."""
    (recomputed, head), engine.recompute, engine.head = (engine.recompute, engine.head), (), None
    try:
        yield
    finally:
        engine.recompute, engine.head = recomputed, head


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
    ways += ["with its head in parts"] if step.head else []
    return " and ".join(ways)


def _names(model: Any) -> _Names:
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


def _owners(optimizer: Any, names: _Names) -> dict[str, str]:
    """The weight that each of an optimizer's variables is kept for: in lists, they are in the order of weights."""
    found: dict[str, str] = {}
    while optimizer is not None:
        weights = getattr(optimizer, "_trainable_variables", [])
        for kind, slots in vars(optimizer).items():
            if kind in ("_variables", "_trainable_variables") or not isinstance(slots, list):
                continue
            pairs = zip(slots, weights, strict=True) if len(slots) == len(weights) else ()
            known = [(names.get(id(slot)), names.get(id(weight))) for slot, weight in pairs]
            found |= {slot[1]: weight[1] for slot, weight in known if slot is not None and weight is not None}
        optimizer = getattr(optimizer, "inner_optimizer", None)
    return found


def _named(step: Provable, names: _Names, values: StepValues) -> dict[str, Any]:
    weights = step.model.trainable_weights if values.gradients else []
    named = {
        f"{proof.GRADIENT}{names[id(variable)][1]}": as_array(gradient)
        for variable, gradient in zip(weights, values.gradients, strict=True)
        if not getattr(variable, "overwrite_with_gradient", False)
    }
    for variable, value in values.written:
        _, name = names.get(id(variable), (variable, variable.path))
        named[name] = as_array(value)
    logs = tree.flatten_with_path(values.logs) if tree.is_nested(values.logs) else [(("loss",), values.logs)]
    return named | {f"log {'/'.join(map(str, path))}": as_array(value) for path, value in logs}


def as_array(value: Any) -> Any:
    if value is None:
        return None
    array = np.asarray(ops.convert_to_numpy(value))
    # NumPy knows nothing of bfloat16 and loses much in float16.
    return array.astype("float32") if array.dtype.itemsize == 2 and array.dtype.kind not in "iu" else array
