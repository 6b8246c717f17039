"""A step of Keras's own training on TensorFlow, as a list of allocations. Nothing is run."""

from __future__ import annotations

from typing import Any

from oomproof.backends.tensorflow.trace_executor import Executor
from oomproof.backends.tensorflow.trace_graph import step_graph
from oomproof.backends.tensorflow.trace_names import Owners
from oomproof.backends.tensorflow.trace_values import Block
from oomproof.tracing import Buffer, Category, Op, Trace, Workload


def trace(model: Any, workload: Workload) -> Trace:
    """Traces a step.

    Args:
        model: A model that is built and compiled. It is left as it was.
        workload: The step.
    """
    graph = step_graph(model, workload)
    execution = Executor(graph, workload.target.gpu).run()
    owners = Owners(graph)
    ops = tuple(Op(node.name, owners.stage(node), owners.layer(node)) for node in execution.ran)
    buffers = tuple(_buffer(block, owners, len(ops)) for block in execution.blocks)
    notes = ["XLA's fusion of ops is not modelled: the compiled step needs less than this."] if workload.jit else []
    return Trace("bfc", ops, buffers, (*notes, *execution.notes))


def _buffer(block: Block, owners: Owners, ops: int) -> Buffer:
    end = ops if block.end is None else block.end
    if block.variable is not None:
        return Buffer(block.size, block.start, end, block.variable.category, block.variable.layer)
    layer = owners.layer(block.node) if block.node is not None else ""
    return Buffer(block.size, block.start, end, _category(block, owners), layer)


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
