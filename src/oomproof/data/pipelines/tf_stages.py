"""A tf.data pipeline as a chain of nodes, read from the Python objects it is made of.

The objects know their inputs and their settings, so nothing is serialized and no data is copied. Their attributes are
TensorFlow's own business; what is not found is said to be unknown and never guessed.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

from oomproof._records.units import DTYPE_BYTES, tensor_bytes

AUTOTUNE = -1
INFINITE, UNKNOWN = -1, -2

# What TensorFlow's classes are called here. Those that only pass elements on hold nothing.
_KINDS = {
    "TensorSlice": "tensor_slices",
    "Tensor": "tensors",
    "Range": "range",
    "Map": "map",
    "ParallelMap": "map",
    "Filter": "filter",
    "Shuffle": "shuffle",
    "Cache": "cache",
    "Batch": "batch",
    "ParallelBatch": "batch",
    "PaddedBatch": "padded_batch",
    "Prefetch": "prefetch",
    "Repeat": "repeat",
    "Take": "take",
    "Skip": "skip",
    "Shard": "shard",
    "Options": "options",
    "Zip": "zip",
    "Concatenate": "concatenate",
    "FlatMap": "flat_map",
    "Interleave": "interleave",
    "ParallelInterleave": "interleave",
    "Unbatch": "unbatch",
    "TFRecordV2": "reader",
    "TextLineV2": "reader",
    "FixedLengthRecordV2": "reader",
    "Restructured": "pass",
    "AssertCardinality": "pass",
    "IgnoreErrors": "pass",
    "Enumerate": "pass",
    "TakeWhile": "pass",
    "Unique": "pass",
}


@dataclasses.dataclass(frozen=True)
class Node:
    """A stage of a pipeline.

    Attributes:
        kind: One of the words above, or `"unknown"`.
        dataset: TensorFlow's object.
        inputs: The stages it takes elements from.
    """

    kind: str
    dataset: Any
    inputs: tuple[Node, ...]

    def number(self, name: str, default: int = 0) -> int:
        """A setting of the stage that is a number, whatever TensorFlow keeps it as."""
        value = getattr(self.dataset, name, None)
        try:
            return default if value is None else int(value)
        except (TypeError, ValueError, NotImplementedError):
            return default  # A tensor of a graph, whose value is known only when the pipeline runs.

    @property
    def parallel_calls(self) -> int | None:
        """How many calls of its function are in flight, `AUTOTUNE`, or `None` for one at a time."""
        return self.number("_num_parallel_calls") or None

    @property
    def on_disk(self) -> bool:
        """Whether a cache is in a file."""
        name = self.dataset._filename
        return bool(name.numpy() if hasattr(name, "numpy") else name)

    @property
    def specs(self) -> list[Any]:
        """TensorFlow's descriptions of the parts of an element."""
        import tensorflow as tf

        return list(tf.nest.flatten(self.dataset.element_spec))

    @functools.cached_property
    def cardinality(self) -> int:
        """Elements in an epoch, `INFINITE` or `UNKNOWN`."""
        return int(self.dataset.cardinality())

    @functools.cached_property
    def function(self) -> Function | None:
        """What it calls for every element."""
        wrapped = getattr(self.dataset, "_map_func", None) or getattr(self.dataset, "_predicate", None)
        return None if wrapped is None or not hasattr(wrapped, "function") else Function(wrapped)

    @property
    def name(self) -> str:
        """As it was written."""
        if self.kind == "unknown":
            return type(self.dataset).__name__.strip("_")
        sizes = {
            "shuffle": "_buffer_size",
            "batch": "_batch_size",
            "padded_batch": "_batch_size",
            "prefetch": "_buffer_size",
            "take": "_count",
            "skip": "_count",
            "repeat": "_count",
            "interleave": "_cycle_length",
        }
        words = {"tensor_slices": "from_tensor_slices", "tensors": "from_tensors", "pass": type(self.dataset).__name__}
        if self.kind in sizes:
            size = self.number(sizes[self.kind])
            return f"{self.kind}({'AUTOTUNE' if size == AUTOTUNE and self.kind == 'prefetch' else size})"
        if self.kind == "cache":
            return "cache(file)" if self.on_disk else "cache()"
        return words.get(self.kind, self.kind).strip("_")


def chain_of(dataset: Any) -> Node:
    """The pipeline that ends in this dataset."""
    name = type(dataset).__name__.strip("_").removesuffix("V1")
    if name == "DatasetV1Adapter":
        return chain_of(dataset._dataset)
    short = name.replace("Dataset", "")
    try:
        inputs = tuple(chain_of(each) for each in dataset._inputs())
    except (AttributeError, NotImplementedError):
        # A dataset class of somebody else's, which does not say what it reads from. The audit names it.
        return Node("unknown", dataset, ())
    kind = _KINDS.get(short, "unknown")
    function = getattr(dataset, "_map_func", None)
    if kind == "flat_map" and function is not None and _makes_python_calls(function):
        kind = "generator"
    return Node(kind, dataset, inputs)


def _makes_python_calls(wrapped: Any) -> bool:
    # from_generator is a flat_map whose inner dataset calls back into Python.
    return "GeneratorDataset" in Function(wrapped).ops


def walk(node: Node) -> Iterator[Node]:
    """All stages, sources first."""
    for each in node.inputs:
        yield from walk(each)
    yield node


_RANDOM = (
    *("Random", "StatefulUniform", "StatefulStandardNormal", "StatefulTruncatedNormal", "TruncatedNormal"),
    *("Multinomial", "RngReadAndSkip", "RngSkip", "SampleDistortedBoundingBox"),
)
# They have state, or an effect, and neither depends on how often or in which order they are called.
_HARMLESS = {"Assert", "LookupTableFindV2", "HashTableV2", "ReadVariableOp", "VarHandleOp", "Placeholder", "NoOp"}
_CALLS = {"PartitionedCall", "StatefulPartitionedCall", "If", "StatelessIf", "While", "StatelessWhile", "Case"}
_PYTHON = {"PyFunc", "EagerPyFunc", "PyFuncStateless"}


class Function:
    """What there is to know of a function in a pipeline, from the graph TensorFlow has traced."""

    def __init__(self, wrapped: Any) -> None:
        self.wrapped = wrapped
        self.concrete = wrapped.function
        self.graph = self.concrete.graph

    @functools.cached_property
    def ops(self) -> set[str]:
        """Names of all operations in it and in the functions it calls."""
        found = {op.type for op in self.graph.get_operations()}
        for definition in self.graph.as_graph_def().library.function:
            found |= {node.op for node in definition.node_def}
        return found

    @property
    def is_random(self) -> bool:
        return any(name.removeprefix("Stateless").startswith(_RANDOM) for name in self.ops)

    @property
    def calls_python(self) -> bool:
        return bool(self.ops & _PYTHON)

    @functools.cached_property
    def is_pure(self) -> bool:
        """Whether an element's outcome depends on the element alone, whenever and however often it is called."""
        from oomproof._compat.tf_data import op_def_registry

        for name in self.ops - _HARMLESS - _CALLS:
            definition = op_def_registry.get(name)
            # What is not registered is a function of this graph, whose own operations are in the set.
            if definition is not None and definition.is_stateful:
                return False
        return True

    @property
    def decodes_and_resizes(self) -> bool:
        decodes = {name for name in self.ops if name in ("DecodeJpeg", "DecodeImage", "DecodePng", "DecodeBmp")}
        return bool(decodes) and any(name.startswith(("Resize", "ScaleAndTranslate")) for name in self.ops)

    @functools.cached_property
    def jpeg_ratio(self) -> int:
        """By how much JPEG images are reduced while they are decoded."""
        found = [op.get_attr("ratio") for op in self.graph.get_operations() if op.type == "DecodeJpeg"]
        return max(found, default=1)

    @functools.cached_property
    def held(self) -> int:
        """Bytes of the tensors that it captures and of the constants in it."""
        captured = sum(size(tensor) for tensor in self.concrete.captured_inputs)
        constants = [op.outputs[0] for op in self.graph.get_operations() if op.type == "Const"]
        return captured + sum(size(tensor) for tensor in constants)

    @functools.cached_property
    def passed_on(self) -> dict[int, int]:
        """{output: input} of what it returns as it got it."""
        inputs = {tensor.name: index for index, tensor in enumerate(self.graph.inputs)}
        found = {}
        for index, tensor in enumerate(self.graph.outputs):
            while tensor.op.type == "Identity":
                tensor = tensor.op.inputs[0]
            if tensor.name in inputs:
                found[index] = inputs[tensor.name]
        return found

    @functools.cached_property
    def working(self) -> int:
        """Bytes of the largest tensor it makes on the way, as far as shapes are known."""
        made = [op for op in self.graph.get_operations() if op.type not in ("Placeholder", "Const", "Identity")]
        last = {id(tensor.op) for tensor in self.graph.outputs}
        return max((size(out) for op in made if id(op) not in last for out in op.outputs), default=0)


def size(tensor: Any) -> int:
    """Bytes of a tensor, as far as its shape is known; strings with what they hold where they can be read."""
    dtype = tensor.dtype.base_dtype.name
    if dtype == "string" and hasattr(tensor, "numpy"):
        import tensorflow as tf

        return int(tf.reduce_sum(tf.strings.length(tensor))) + 24 * int(tf.size(tensor))
    if dtype in ("variant", "resource") or not tensor.shape.is_fully_defined():
        return 0
    return tensor_bytes(tuple(tensor.shape), dtype) if dtype in DTYPE_BYTES else 0
