"""The graph TensorFlow would run for a step: traced from Keras's own step and rewritten as TensorFlow rewrites it.

TensorFlow's graph optimizer (Grappler) inlines functions, turns loops and conditions into plain nodes, folds constants,
fuses, and on a GPU changes the layout of convolutions. It is told of a GPU that need not be there.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from keras import tree
from tensorflow.core.protobuf import config_pb2, device_properties_pb2, meta_graph_pb2, rewriter_config_pb2

from oomproof._backends.common.recompute import recomputing
from oomproof._backends.tensorflow.engine import TensorFlowEngine
from oomproof._compat.tensorflow import cluster, item, tf_optimizer
from oomproof._records.trace import Category, Target, Workload
from oomproof._records.units import tensor_bytes
from oomproof._simulators.tensorflow.scopes import layer_paths, noted_scopes
from oomproof._simulators.tensorflow.state import traceable
from oomproof._simulators.tensorflow.updates import repeated_updates

_GPU = "/job:localhost/replica:0/task:0/device:GPU:0"
_CPU = "/job:localhost/replica:0/task:0/device:CPU:0"
_ITERATOR = "oomproof_iterator"
_WITHOUT_STORAGE = ("variant", "resource", "string")
_VALUES_UP_TO = 64  # Elements of a constant that are worth looking at: shapes, axes, lengths of loops.


@dataclasses.dataclass(frozen=True, slots=True)
class TensorType:
    """What is known of a tensor: its shape, with negative numbers or `None` for what is not known, and its dtype."""

    shape: tuple[int, ...] | None
    dtype: str

    @property
    def known(self) -> bool:
        return self.shape is not None and min(self.shape, default=0) >= 0

    @property
    def size(self) -> int:
        if self.shape is None or self.dtype in _WITHOUT_STORAGE:
            return 0
        return tensor_bytes(tuple(max(n, 0) for n in self.shape), self.dtype)


@dataclasses.dataclass(slots=True, eq=False)
class Node:
    """An op of the graph.

    Attributes:
        inputs: (node, output) by position.
        controls: Nodes it waits for without using their results.
        value: The value of a small constant.
    """

    name: str
    op: str
    attributes: Any
    outputs: list[TensorType]
    inputs: list[tuple[Node, int]] = dataclasses.field(default_factory=list)
    controls: list[Node] = dataclasses.field(default_factory=list)
    value: Any = None

    @property
    def input_types(self) -> list[TensorType]:
        return [node.outputs[port] for node, port in self.inputs]


@dataclasses.dataclass(frozen=True, slots=True)
class Variable:
    """A weight, a slot of the optimizer or the state of a metric.

    Attributes:
        shape: Its shape.
        size: In bytes.
        category: What it is for.
        layer: Path of the layer it belongs to, or for a slot, the layer whose weight it updates.
        node: Name of the node that stands for it; empty where the step does not use it.
    """

    shape: tuple[int, ...]
    size: int
    category: Category
    layer: str
    node: str


@dataclasses.dataclass(frozen=True, slots=True)
class StepGraph:
    """A step as a graph.

    Attributes:
        nodes: In TensorFlow's order.
        variables: What is kept from step to step.
        results: Names of the nodes whose results the step returns.
        scopes: The layer that each name scope belongs to.
        handles: The name of the node that stands for each variable, by `id` of the variable's handle.
    """

    nodes: list[Node]
    variables: list[Variable]
    results: frozenset[str]
    scopes: dict[str, str]
    handles: dict[int, str]


def step_graph(model: Any, workload: Workload) -> StepGraph:
    x, y = (tree.map_structure(_tensor_spec, part) for part in (workload.x, workload.y))
    data = (x,) if y is None else (x, y)
    with (
        traceable(model, data, workload.phase),
        noted_scopes() as scopes,
        recomputing(model, workload.recompute, TensorFlowEngine(model)),
        repeated_updates(model),
    ):
        step: Callable[[Any], Any] = getattr(model, f"{workload.phase}_step")
        # In `fit` it is a function within a function, and which op runs first of two that could depends on it.
        inner = tf.function(lambda data: step(data), autograph=False)
        graph = tf.function(lambda data: inner(data), autograph=False).get_concrete_function(data).graph
        found = function_graph(graph, graph.outputs, workload.target)
        variables = variables_of(model, workload, found.handles)
    return dataclasses.replace(found, variables=variables, scopes=scopes)


def function_graph(graph: Any, results: Sequence[Any], target: Target) -> StepGraph:
    """The graph of a function as TensorFlow would run it; what is among the results is kept to the end."""
    definition = graph.as_graph_def()
    handles = _handles_as_variables(definition, graph)
    _batch_from_iterator(definition, graph)
    kept = [tensor.name for tensor in results]
    optimized = _as_tensorflow_runs_it(definition, [*kept, *(op.name for op in graph.control_outputs)], target)
    return StepGraph(_nodes(optimized), [], frozenset(name.split(":")[0] for name in kept), {}, handles)


def _tensor_spec(spec: Any) -> Any:
    return None if spec is None else tf.TensorSpec(spec.shape, spec.dtype)


def _handles_as_variables(definition: Any, graph: Any) -> dict[int, str]:
    """Turns inputs of the function that are variables into nodes that say what the variable is like.

    Returns:
        The name of each node, by `id` of the variable's handle.
    """
    variables = {id(variable.handle): variable for variable in graph.variables}
    nodes = {node.name: node for node in definition.node}
    found = {}
    for outer, inner in graph.captures:
        variable = variables.get(id(outer))
        if variable is None:
            continue
        node = nodes[inner.op.name]
        node.op = "VarHandleOp"
        node.attr.clear()
        node.attr["dtype"].type = variable.dtype.base_dtype.as_datatype_enum
        node.attr["shape"].shape.CopyFrom(variable.shape.as_proto())
        node.attr["shared_name"].s = inner.op.name.encode()
        found[id(outer)] = inner.op.name
    return found


def _batch_from_iterator(definition: Any, graph: Any) -> None:
    """Turns the inputs that are left into what they are in `fit`, where, unlike for a placeholder, sizes are known."""
    nodes = {node.name: node for node in definition.node}
    definition.node.add(name=_ITERATOR, op="AnonymousIterator")
    iterator = definition.node[-1]
    for tensor in graph.inputs:
        node = nodes[tensor.op.name]
        if node.op != "Placeholder" or tensor.dtype in (tf.resource, tf.variant):
            continue
        node.op = "IteratorGetNext"
        node.attr.clear()
        node.input.append(_ITERATOR)
        for end in (node, iterator):
            end.attr["output_types"].list.type.append(tensor.dtype.as_datatype_enum)
            end.attr["output_shapes"].list.shape.append(tensor.shape.as_proto())


def variables_of(model: Any, workload: Workload, handles: dict[int, str]) -> list[Variable]:
    """What is kept from step to step. `handles` has the name of each variable's node, by `id` of its handle."""
    kinds: list[tuple[Category, Sequence[Any]]] = [("weights", model.variables)]
    if workload.phase == "train" and model.optimizer is not None:
        kinds.append(("optimizer", model.optimizer.variables))
    if workload.phase != "predict":
        kinds.append(("temporary", model.metrics_variables))
    layers = layer_paths(model)
    # A slot is named after its weight.
    by_name = {variable.path.replace("/", "_"): layers.get(id(variable), "") for variable in model.variables}
    found: dict[int, Variable] = {}
    for category, variables in kinds:
        for variable in variables:
            layer = layers.get(id(variable))
            if layer is None:
                weights = [name for name in by_name if variable.name.startswith(f"{name}_")]
                layer = by_name[max(weights, key=len)] if weights else ""
            handle = id(variable.value.handle)
            shape = tuple(variable.shape)
            size = tensor_bytes(shape, variable.dtype)
            found.setdefault(handle, Variable(shape, size, category, layer, handles.get(handle, "")))
    return list(found.values())


def _as_tensorflow_runs_it(definition: Any, fetched: Sequence[str], target: Target) -> Any:
    config = config_pb2.ConfigProto()
    rewriting = config.graph_options.rewrite_options
    # Small graphs are not worth the time to TensorFlow, and it leaves them alone otherwise.
    rewriting.min_graph_nodes = -1
    # As it comes, this pass only marks assignments, which is not looked at here, and takes a tenth of the time.
    rewriting.memory_optimization = rewriter_config_pb2.RewriterConfig.NO_MEM_OPT
    # This one moves code into branches that are still functions, which by then are plain nodes.
    rewriting.experimental_conditional_code_motion = rewriter_config_pb2.RewriterConfig.OFF
    devices = [_device(_CPU, "CPU")]
    if target.gpu:
        architecture = ".".join(map(str, target.capability))
        devices.append(_device(_GPU, "GPU", architecture=architecture, cuda="12050", cudnn="90300"))
        for node in definition.node:
            node.device = _GPU
    machine = cluster.Cluster(devices=devices)
    try:
        return tf_optimizer.OptimizeGraph(config, _fetching(definition, fetched), verbose=False, cluster=machine)
    finally:
        machine.Shutdown()


def _device(name: str, kind: str, **environment: str) -> Any:
    properties = device_properties_pb2.DeviceProperties(
        type=kind, num_cores=8, frequency=1000, memory_size=2**36, bandwidth=10**9, environment=environment
    )
    return device_properties_pb2.NamedDevice(name=name, properties=properties)


def _fetching(definition: Any, fetched: Sequence[str]) -> Any:
    meta = meta_graph_pb2.MetaGraphDef(graph_def=definition)
    meta.collection_def["train_op"].node_list.value.extend(fetched)
    return meta


def _nodes(definition: Any) -> list[Node]:
    properties = item.Item(_fetching(definition, [definition.node[-1].name])).GetOpProperties()
    nodes = {}
    for proto in definition.node:
        types = [_type(known) for known in properties.get(proto.name, ())]
        nodes[proto.name] = Node(proto.name, proto.op, proto.attr, types, value=_small_constant(proto))
    for proto in definition.node:
        node = nodes[proto.name]
        for source in proto.input:
            if source.startswith("^"):
                node.controls.append(nodes[source[1:]])
            else:
                name, _, port = source.partition(":")
                node.inputs.append((nodes[name], int(port or 0)))
    return list(nodes.values())


def _type(known: Any) -> TensorType:
    shape = None if known.shape.unknown_rank else tuple(int(d.size) for d in known.shape.dim)
    return TensorType(shape, tf.dtypes.as_dtype(known.dtype).base_dtype.name)


def _small_constant(proto: Any) -> Any:
    if proto.op != "Const":
        return None
    tensor = proto.attr["value"].tensor
    if math.prod(d.size for d in tensor.tensor_shape.dim) > _VALUES_UP_TO or tensor.dtype == tf.string:
        return None
    return np.asarray(tf.make_ndarray(tensor))
