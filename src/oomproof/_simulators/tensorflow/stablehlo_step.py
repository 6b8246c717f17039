"""A step as TensorFlow hands it to XLA: the text of a program, and what its arguments are."""

from __future__ import annotations

import contextlib
import dataclasses
import types
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf
from keras import tree

from oomproof._backends.common.recompute import recomputing
from oomproof._backends.tensorflow.engine import TensorFlowEngine
from oomproof._compat.tensorflow import compiler_ir, context
from oomproof._records.trace import Workload
from oomproof._simulators.tensorflow.graph import variables_of
from oomproof._simulators.tensorflow.names import Scopes
from oomproof._simulators.tensorflow.scopes import OPTIMIZER, noted_scopes
from oomproof._simulators.tensorflow.state import traceable
from oomproof._simulators.tensorflow.updates import repeated_updates
from oomproof._simulators.xla.writer import Role
from oomproof.errors import UnsupportedModelError

# TensorFlow lowers a square root by passes of MLIR that it sets up for each one anew, 6 ms every time, and an optimizer
# takes two for each weight. A tangent has the same shape, and is lowered at once.
_SLOW, _QUICK = "Sqrt", "Tan"
_SLOW_TEXT, _QUICK_TEXT = "stablehlo.sqrt ", "stablehlo.tan "


@dataclasses.dataclass(frozen=True)
class StableHLOStep:
    """A step as StableHLO.

    Attributes:
        text: The program. It says which results take the place of which arguments.
        roles: What each argument is: the batch, then everything the step refers to.
        scopes: The layer that each name scope belongs to.
    """

    text: str
    roles: tuple[Role, ...]
    scopes: dict[str, str]


def stablehlo_step(model: Any, workload: Workload) -> StableHLOStep:
    """The step Keras would run, compiled as far as it can be without a device.

    Args:
        model: A model that is built and compiled. It stays as it was; slots it has not got yet are made for the time
            being, since TensorFlow lowers no program whose variables have no values.
        workload: The step.

    Raises:
        UnsupportedModelError: When TensorFlow cannot lower the step.
    """
    batch = (workload.x,) if workload.phase == "predict" or workload.y is None else (workload.x, workload.y)
    specs = tree.map_structure(lambda spec: tf.TensorSpec(spec.shape, spec.dtype), batch)
    flat = tree.flatten(specs)
    step = getattr(model, f"{workload.phase}_step")

    def of_flat(*tensors: Any) -> Any:
        return step(tree.pack_sequence_as(specs, list(tensors)))

    with (
        traceable(model, specs, workload.phase, storage=True),
        noted_scopes() as scopes,
        recomputing(model, workload.recompute, TensorFlowEngine(model, static=True)),
        repeated_updates(model),
    ):
        try:
            program = tf.function(of_flat, jit_compile=True, autograph=False).get_concrete_function(*flat)
            text = _text(program, flat, scopes)
        except (ValueError, TypeError, tf.errors.OpError) as error:
            raise UnsupportedModelError(
                f"XLA cannot compile a step of {model.name}: {str(error).strip().splitlines()[0]} "
                "Estimate it without compiling: jit=False."
            ) from error
        captured = program.captured_inputs
        numbers = {id(handle): str(number) for number, handle in enumerate(captured)}
        known = {variable.node: variable for variable in variables_of(model, workload, numbers) if variable.node}
    roles = [Role("input", "")] * len(flat)
    for number in range(len(captured)):
        variable = known.get(str(number))
        roles.append(Role("temporary", "") if variable is None else Role(variable.category, variable.layer))
    return StableHLOStep(text, tuple(roles), scopes)


def _text(program: Any, specs: Sequence[Any], scopes: dict[str, str]) -> str:
    """A concrete function as StableHLO."""
    with _quick_to_lower(program, Scopes(scopes)) as quick:
        text = str(compiler_ir.from_concrete_function(quick or program, list(specs))(stage="stablehlo"))
    return text if quick is None else text.replace(_QUICK_TEXT, _SLOW_TEXT)


@contextlib.contextmanager
def _quick_to_lower(program: Any, scopes: Scopes) -> Iterator[Any]:
    """The function with tangents for the square roots of its optimizer; `None` where it has tangents of its own.

    Only the optimizer's: elsewhere TensorFlow may compute one while it lowers, and a shape may depend on it.
    """
    definition = program.function_def
    inner = [function.cached_definition for function in program.graph._functions.values()]
    if any(node.op == _QUICK for function in (definition, *inner) for node in function.node_def):
        yield None
        return
    changed = type(definition)()
    changed.CopyFrom(definition)
    changed.signature.name += "_quick_to_lower"
    for node in changed.node_def:
        if node.op == _SLOW and scopes.owner(node.name) == OPTIMIZER:
            node.op = _QUICK
    name = changed.signature.name
    context.context().add_function_def(changed)
    try:
        yield types.SimpleNamespace(name=name, captured_inputs=program.captured_inputs, inputs=program.inputs)
    finally:
        context.context().remove_function(name)
