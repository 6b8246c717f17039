"""A Keras step on JAX as a list of allocations, from its jaxpr: nothing is compiled, nothing is run.

The jaxpr is what XLA is given. What XLA makes of it is modelled in `backends/xla`: which arrays it keeps (fusion.py),
what it adds (kernels.py), and in which order it computes them (schedule.py).
"""

from __future__ import annotations

import re
from typing import Any

import jax

from oomproof._records.trace import Allocator, Stage, Trace, Workload
from oomproof._simulators.jax.abstract import abstract_step, layer_paths
from oomproof._simulators.jax.jaxpr import flattened
from oomproof._simulators.xla.fusion import Fusion
from oomproof._simulators.xla.notes import notes_on
from oomproof._simulators.xla.program import Node, Program
from oomproof._simulators.xla.schedule import in_order, planned
from oomproof._simulators.xla.writer import Writer

_WRAPPED = re.compile(r"^\w+\((.*)\)$")


def trace(model: Any, workload: Workload) -> Trace:
    """The allocations of one step.

    Args:
        model: A Keras model whose weights are there. It stays as it was.
        workload: The step.

    Returns:
        Its trace. State and batch are there before and after; what is written over the state takes no memory.
    """
    with abstract_step(model, workload) as step:
        # Not `step.function` itself: JAX remembers what it traced by function, and the model may have changed since.
        jaxpr = jax.make_jaxpr(lambda state, data: step.function(state, data))(step.state, step.data)
        names = _Names(model)
    program = flattened(jaxpr, workload.target.gpu, compiled=workload.jit)
    allocator: Allocator = "xla"
    if workload.jit:
        settled = _settled(program, len(jax.tree.leaves(step.state)))
        plan = planned(Fusion(program).kernels, settled)
        notes = (*step.notes, *notes_on(program))
    else:
        # Op by op every result is an array of its own, in the allocator that JAX has on GPUs.
        allocator = "bfc"
        settled = set()
        plan = in_order(Fusion(program, fuse=False).kernels)
        notes = (*step.notes, "Run op by op, arrays that Python still refers to are not counted.")
    return Writer(program, plan, settled, step.roles, names).trace(allocator, notes)


def _settled(program: Program, state: int) -> set[int]:
    """Results that take the place of the state, which Keras gives away. They come last."""
    results = program.outputs[len(program.outputs) - state :]
    return {id(value) for value in results if value is not None}


class _Names:
    """Which layer, and which part of the step, an operation belongs to, from JAX's name stack."""

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
