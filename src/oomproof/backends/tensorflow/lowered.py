"""A step as TensorFlow hands it to XLA: the text of a program, and what its arguments are."""

from __future__ import annotations

import dataclasses
from typing import Any

import tensorflow as tf
from keras import tree

from oomproof.backends.common.recompute import recomputing
from oomproof.backends.tensorflow.engine import TensorFlowEngine
from oomproof.backends.tensorflow.trace_graph import variables_of
from oomproof.backends.tensorflow.trace_scopes import noted_scopes
from oomproof.backends.tensorflow.trace_state import traceable
from oomproof.backends.xla.writer import Role
from oomproof.errors import UnsupportedModelError
from oomproof.tracing import Workload


@dataclasses.dataclass(frozen=True)
class Lowered:
    """A step as StableHLO.

    Attributes:
        text: The program. It says which results take the place of which arguments.
        roles: What each argument is: the batch, then everything the step refers to.
        scopes: The layer that each name scope belongs to.
    """

    text: str
    roles: tuple[Role, ...]
    scopes: dict[str, str]


def lowered(model: Any, workload: Workload) -> Lowered:
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
    ):
        program = tf.function(of_flat, jit_compile=True, autograph=False)
        try:
            text = str(program.experimental_get_compiler_ir(*flat)(stage="stablehlo"))
        except (ValueError, TypeError, tf.errors.OpError) as error:
            raise UnsupportedModelError(
                f"XLA cannot compile a step of {model.name}: {str(error).strip().splitlines()[0]} "
                "Estimate it without compiling: jit=False."
            ) from error
        captured = program.get_concrete_function(*flat).captured_inputs
        numbers = {id(handle): str(number) for number, handle in enumerate(captured)}
        known = {variable.node: variable for variable in variables_of(model, workload, numbers) if variable.node}
    roles = [Role("input", "")] * len(flat)
    for number in range(len(captured)):
        variable = known.get(str(number))
        roles.append(Role("temporary", "") if variable is None else Role(variable.category, variable.layer))
    return Lowered(text, tuple(roles), scopes)
