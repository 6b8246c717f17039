"""A Keras step on JAX as a list of allocations, from its jaxpr: nothing is compiled, nothing is run.

The jaxpr is what XLA is given. What XLA makes of it is modelled: which arrays it keeps (`fusion.py`), what it adds
(`kernels.py`), and in which order it computes them (`schedule.py`).
"""

from __future__ import annotations

import re
from typing import Any

import jax

from oomproof.backends.jax.abstract import AbstractStep, Role, abstract_step, layer_paths
from oomproof.backends.jax.fusion import Fusion
from oomproof.backends.jax.kernels import Kernel
from oomproof.backends.jax.program import Node, Program, Value, flattened
from oomproof.backends.jax.schedule import Plan, in_order, planned
from oomproof.tracing import Allocator, Buffer, Category, Op, Stage, Trace, Workload

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
    program = flattened(jaxpr)
    allocator: Allocator = "xla"
    if workload.jit:
        settled = _settled(program, len(jax.tree.leaves(step.state)))
        plan = planned(Fusion(program).kernels, settled)
        notes = (*step.notes, "Workspaces of convolutions and matrix products are not counted.")
    else:
        # Op by op every result is an array of its own, in the allocator that JAX has on GPUs.
        allocator = "bfc"
        settled = set()
        plan = in_order(Fusion(program, fuse=False).kernels)
        notes = (*step.notes, "Run op by op, arrays that Python still refers to are not counted.")
    return _Writer(program, plan, settled, step, names).trace(allocator, notes)


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


class _Writer:
    """Turns a plan into ops and buffers."""

    def __init__(self, program: Program, plan: Plan, settled: set[int], step: AbstractStep, names: _Names) -> None:
        self._program = program
        self._plan = plan
        self._settled = settled
        self._roles = step.roles
        self._layers: dict[int, str] = {}
        self._stages: list[Stage] = []
        self._ops: list[Op] = []
        for value in program.inputs:
            self._layers[id(value)] = self._role(value).layer
        for kernel in plan.kernels:
            self._op(kernel, *names(kernel.node))

    def trace(self, allocator: Allocator, notes: tuple[str, ...]) -> Trace:
        count = len(self._ops)
        buffers = [
            Buffer(value.size, -1, count, self._role(value).category, self._role(value).layer)
            for value in self._program.inputs
        ]
        readers = self._readers()
        for index, kernel in enumerate(self._plan.kernels):
            for value in kernel.makes:
                if (span := self._plan.spans.get(id(value))) is not None:
                    category = self._category(index, readers.get(id(value), []))
                    buffers.append(Buffer(value.size, *span, category, self._layers[id(value)]))
            if kernel.scratch:
                buffers.append(Buffer(kernel.scratch, index, index, "temporary", self._ops[index].layer))
        return Trace(allocator, tuple(self._ops), tuple(b for b in buffers if b.size), notes)

    def _role(self, value: Value) -> Role:
        assert value.given is not None
        return self._roles[value.given]

    def _op(self, kernel: Kernel, stage: Stage, layer: str) -> None:
        if not layer:
            # The loss, or the optimizer: said of the layer whose result or weight is the most of what it works on.
            named = [value for value in kernel.reads if self._layers.get(id(value))]
            layer = self._layers[id(max(named, key=lambda value: value.size))] if named else ""
        if kernel.node.scope == "" and any(id(value) in self._settled for value in kernel.makes):
            stage = "update"
        self._ops.append(Op(kernel.node.name, stage, layer))
        self._layers.update((id(value), layer) for value in kernel.makes)

    def _readers(self) -> dict[int, list[Stage]]:
        readers: dict[int, list[Stage]] = {}
        for op, kernel in zip(self._ops, self._plan.kernels, strict=True):
            for value in kernel.reads:
                readers.setdefault(id(value), []).append(op.stage)
        return readers

    def _category(self, index: int, readers: list[Stage]) -> Category:
        stage = self._ops[index].stage
        if stage == "forward" and "backward" in readers:
            return "activations"
        return "gradients" if stage == "backward" and "update" in readers else "temporary"
