"""A step of Keras's own training on TensorFlow, as a list of allocations. Nothing is run."""

from __future__ import annotations

from typing import Any

from oomproof._records.trace import Buffer, Category, Op, Trace, Workload
from oomproof._simulators.collector import collector_off
from oomproof._simulators.tensorflow.executor import Executor
from oomproof._simulators.tensorflow.graph import step_graph
from oomproof._simulators.tensorflow.names import Owners, Scopes
from oomproof._simulators.tensorflow.stablehlo_step import StableHLOStep, stablehlo_step
from oomproof._simulators.tensorflow.values import Block
from oomproof._simulators.xla.stablehlo import read
from oomproof._simulators.xla.trace import compiled_trace

# Ops of which the first step tries every kernel that there is.
_SEARCHED = ("Conv2D", "Conv3D")
_SEARCH = (
    "this is the peak of every step but the first of a shape, which looks for the quickest kernels and lets each work "
    "in up to 8 GB more; under a guard, in a sixteenth of the memory"
)


def trace(model: Any, workload: Workload) -> Trace:
    """Traces a step.

    Args:
        model: A model that is built and compiled. It is left as it was.
        workload: The step.
    """
    if workload.jit:
        return compiled_step_trace(stablehlo_step(model, workload), workload)
    with collector_off():
        graph = step_graph(model, workload)
    execution = Executor(graph, workload.target.gpu).run()
    owners = Owners(graph, bool(workload.recompute))
    ops = tuple(Op(node.name, owners.stage(node), owners.layer(node)) for node in execution.ran)
    buffers = tuple(_buffer(block, owners, len(ops)) for block in execution.blocks)
    notes = list(execution.notes)
    if workload.target.gpu and any(node.op.startswith(_SEARCHED) for node in execution.ran):
        notes.append(_SEARCH)
    return Trace("bfc" if workload.target.gpu else "bfc-growing", ops, buffers, tuple(notes))


def compiled_step_trace(step: StableHLOStep, workload: Workload) -> Trace:
    """What XLA would make of the program that TensorFlow gives it, modelled as for JAX."""
    program, settled = read(step.text, workload.target.gpu)
    scopes = Scopes(step.scopes)
    return compiled_trace(program, settled, step.roles, lambda node: scopes.place(node.scope))


def _buffer(block: Block, owners: Owners, ops: int) -> Buffer:
    end = ops if block.end is None else block.end
    if (variable := block.variable) is not None:
        # Kernels and tables are drawn at random; biases, scales and statistics are filled with one number.
        drawn = block.start < 0 and variable.category == "weights" and len(variable.shape) > 1
        return Buffer(block.size, block.start, end, variable.category, variable.layer, drawn=drawn, first=block.first)
    layer = owners.layer(block.node) if block.node is not None else ""
    return Buffer(block.size, block.start, end, _category(block, owners), layer, block.fixed)


def _category(block: Block, owners: Owners) -> Category:
    if block.node is None or block.last_user is None:
        return "temporary"
    if block.node.op == "IteratorGetNext":
        return "input"
    match owners.stage(block.node), owners.stage(block.last_user):
        case "forward", "backward":
            return "activations"
        case "backward", "update":
            return "gradients"
        case _:
            return "temporary"
