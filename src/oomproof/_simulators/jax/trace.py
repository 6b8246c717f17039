"""A Keras step on JAX as a list of allocations, from its jaxpr: nothing is compiled, nothing is run.

The jaxpr is what XLA is given. What XLA makes of it is modelled in xla/.
"""

from __future__ import annotations

import re
from typing import Any

import jax

from oomproof._records.trace import Stage, Trace, Workload
from oomproof._simulators.jax.jaxpr import flattened
from oomproof._simulators.jax.keras_step import keras_step, layer_paths
from oomproof._simulators.xla.program import Node, Program
from oomproof._simulators.xla.trace import compiled_trace, op_by_op_trace

_WRAPPED = re.compile(r"^\w+\((.*)\)$")


def trace(model: Any, workload: Workload) -> Trace:
    """The allocations of one step.

    Args:
        model: A Keras model whose weights are there. It stays as it was.
        workload: The step.

    Returns:
        Its trace. State and batch are there before and after; what is written over the state takes no memory.
    """
    with keras_step(model, workload) as step:
        # Not `step.function` itself: JAX remembers what it traced by function, and the model may have changed since.
        jaxpr = jax.make_jaxpr(lambda state, data: step.function(state, data))(step.state, step.data)
        places = _Places(model)
    program = flattened(jaxpr, workload.target.gpu, compiled=workload.jit)
    if not workload.jit:
        return op_by_op_trace(program, step.roles, places, step.notes)
    settled = _settled(program, len(jax.tree.leaves(step.state)))
    return compiled_trace(program, settled, step.roles, places, step.notes)


def _settled(program: Program, state: int) -> set[int]:
    """Results that take the place of the state, which Keras gives away. They come last."""
    results = program.outputs[len(program.outputs) - state :]
    return {id(value) for value in results if value is not None}


class _Places:
    """The part of the step and the layer an operation belongs to, from JAX's name stack."""

    def __init__(self, model: Any) -> None:
        self._model = model.name
        self._paths = layer_paths(model)
        self._optimizer = getattr(getattr(model, "optimizer", None), "name", None)
        self._known: dict[str, tuple[Stage, str]] = {}

    def __call__(self, node: Node) -> tuple[Stage, str]:
        if node.scope not in self._known:
            self._known[node.scope] = self._find(node.scope)
        return self._known[node.scope]

    def _find(self, scope: str) -> tuple[Stage, str]:
        parts = []
        for part in scope.split("/"):
            while found := _WRAPPED.match(part):
                part = found.group(1)
            parts.append(part)
        if parts[0] == self._optimizer:
            return "update", ""
        stage: Stage = "backward" if "transpose(" in scope else "forward"
        if parts[0] == self._model and parts[0] not in self._paths:
            parts = parts[1:]
        for length in range(len(parts), 0, -1):
            if (path := "/".join(parts[:length])) in self._paths:
                return stage, path
        return stage, ""
