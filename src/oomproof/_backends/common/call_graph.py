"""A built model as the list of calls Keras makes when it runs it, each with a label to name it by.

A label is the path of a layer from the outermost model inwards, without that model's own name: `"backbone/conv_1"`.
A layer that Keras named itself goes by its place, `"conv2d[2]"` for the second of its kind in its model: Keras's
running numbers are others when the same code builds the model again. Later calls of a shared layer have a number:
`"dense#2"`. A segment is one label, or the first and the last of calls that follow each other in one graph:
`"backbone/conv_1..backbone/relu_3"`.
"""

from __future__ import annotations

import collections
import dataclasses
import re
from collections.abc import Iterator
from typing import Any

import keras

from oomproof._compat.keras import Function, Functional


@dataclasses.dataclass(frozen=True)
class Call:
    """One call of a layer or operation of a graph.

    Attributes:
        label: See above.
        name: The same with the names that layers have in this process.
        path: The label without the number of the call: with a slash, the prefix of what is called, if that is a model.
        node: Keras's record of the call.
        inputs: Ids of the symbolic tensors it takes.
        outputs: Ids of those it makes.
    """

    label: str
    name: str
    path: str
    node: Any
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]

    @property
    def operation(self) -> Any:
        return self.node.operation


@dataclasses.dataclass(frozen=True)
class Graph:
    """A model, or a model within a model, that Keras runs call by call.

    Attributes:
        prefix: Of the labels of its calls, with a slash at the end; empty for the outermost.
        names: Likewise of the names.
        function: What runs it: the model itself, or what a Sequential model made of its layers.
        calls: In the order in which Keras makes them.
    """

    prefix: str
    names: str
    function: Any
    calls: tuple[Call, ...]


def graph_of(model: Any) -> Any | None:
    """What runs a model call by call, or `None` where its code is its own."""
    if isinstance(model, keras.Sequential):
        return model._functional if type(model).call is keras.Sequential.call else None
    return model if isinstance(model, Functional) and type(model).call is Functional.call else None


def graphs(model: Any, prefix: str = "", names: str | None = None) -> Iterator[Graph]:
    """The graph of a model and those of the models in it, outermost first. None for a model with code of its own."""
    function = graph_of(model)
    if function is None:
        return
    names = prefix if names is None else names
    found = Graph(prefix, names, function, tuple(_calls(function, prefix, names)))
    yield found
    seen: set[int] = set()
    for call in found.calls:
        inner = call.operation
        if isinstance(inner, keras.Model) and id(inner) not in seen:
            seen.add(id(inner))
            yield from graphs(inner, f"{call.path}/", f"{names}{inner.name}/")


def _calls(function: Function, prefix: str, names: str) -> Iterator[Call]:
    times: collections.Counter[int] = collections.Counter()
    places: dict[int, str] = {}
    kinds: collections.Counter[str] = collections.Counter()
    for depth in sorted(function._nodes_by_depth, reverse=True):
        for node in function._nodes_by_depth[depth]:
            if not node.operation or node.is_input:
                continue
            times[id(node.operation)] += 1
            number = times[id(node.operation)]
            if id(node.operation) not in places:
                places[id(node.operation)] = _place(node.operation, kinds)
            path, again = f"{prefix}{places[id(node.operation)]}", f"#{number}" if number > 1 else ""
            inputs = tuple(id(tensor) for tensor in node.input_tensors)
            outputs = tuple(id(tensor) for tensor in node.outputs)
            yield Call(f"{path}{again}", f"{names}{node.operation.name}{again}", path, node, inputs, outputs)


def _place(operation: Any, kinds: collections.Counter[str]) -> str:
    """What a layer goes by in labels: its name, or the how manieth of its kind it is if Keras named it."""
    kind = re.sub("(.)([A-Z][a-z]+)", r"\1_\2", type(operation).__name__)
    kind = re.sub("([a-z])([A-Z])", r"\1_\2", kind).lower()
    if not re.fullmatch(rf"{re.escape(kind)}(_\d+)?", operation.name):
        return str(operation.name)
    kinds[kind] += 1
    return f"{kind}[{kinds[kind]}]"
