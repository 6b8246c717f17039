"""The path of an operation → the layer it belongs to."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

# What frameworks put around a layer's own name.
_WRAPPERS = re.compile(
    r"StatefulPartitionedCall(?:_\d+)?|PartitionedCall(?:_\d+)?|gradient_tape|gradients?(?:_\d+)?|grad_ys_\d+|while(?:_\d+)?|"
    r"body|cond(?:_\d+)?|branch\w*|then|else|cluster\w*|jit\(.*\)|pjit\(.*\)|vmap\(.*\)|checkpoint|remat\w*|"
    r"replica(?:_\d+)?|training(?:_\d+)?|loss(?:_\d+)?|IteratorGetNext|oomproof_\w+|shard_map|main|tower_\d+|"
    r"__inference_\w+|__wrapped__\w+|rematted_computation",
)
_MODELS = re.compile(r"(?:model|functional|sequential)(?:_\d+)*")
_OPTIMIZERS = re.compile(
    r"(?:adamw?|sgd|rmsprop|adagrad|adadelta|adamax|nadam|ftrl|lion|adafactor|lamb|optimizer|apply_gradients|update_\w*)"
    r"(?:_\d+)?",
    re.IGNORECASE,
)
# TensorFlow's operations begin with a capital letter; some wear a scope of their own.
_OPERATIONS = re.compile(
    r"[A-Z][A-Za-z0-9]*(?:_\d+)*|(?:add|sub|mul|div|truediv|pow|sqrt|square|mean|sum|max|min|einsum|concat|stack|split|"
    r"reshape|transpose|strided_slice|moments|batchnorm|random_uniform|zeros|ones|zeros_like|ones_like|convolution|"
    r"embedding_lookup|dot_general|conv_general_dilated|reduce_\w+|broadcast_in_dim|select_n|exp|log|tanh|logistic|"
    r"convert_element_type|gather|scatter\S*|dynamic_slice|dynamic_update_slice|cumsum|iota|sort|div_no_nan|"
    r"clip_by_value|assign\w*|ReadVariableOp|squared_difference|SquaredDifference|softmax|relu|gelu|dot|bias_add)(?:_\d+)*"
)
_TRANSFORMED = re.compile(r"(?:jvp|transpose|vmap|remat|checkpoint|named|custom_\w+)\((.*)\)")


def layer_of(op: str, model: Any = None) -> str | None:
    """The layer's name, or its path where a name is not enough; `None` where it is no layer's operation.

    With a model, only one of its own layers is an answer.
    """
    parts = [part for part in _parts(op) if part]
    if model is not None:
        return _in_model(parts, model)
    if any(_OPTIMIZERS.fullmatch(part) for part in parts):
        return None
    while len(parts) > 1 and _OPERATIONS.fullmatch(parts[-1]):
        parts.pop()
    if len(parts) == 1 and (parts[0] == op.split("/")[-1] or _MODELS.fullmatch(parts[0])):
        # An operation without a scope.
        return None
    if len(parts) > 1 and _MODELS.fullmatch(parts[0]):
        parts = parts[1:]
    return parts[-1] if parts else None


def _parts(op: str) -> Iterator[str]:
    for part in op.strip("/").split("/"):
        while found := _TRANSFORMED.fullmatch(part):
            part = found[1]
        if not _WRAPPERS.fullmatch(part):
            yield part


def _in_model(parts: list[str], model: Any) -> str | None:
    layers = list(_layers(model))
    names = [name for name, _ in layers]
    for part in reversed(parts):
        # Keras counts scopes of the same name: `dense` may come out as `dense_1`.
        for name in (part, re.sub(r"_\d+$", "", part)):
            if name in names:
                if names.count(name) == 1:
                    return name
                within = [path for each, path in layers if each == name and _follows(path, parts)]
                return max(within, key=lambda path: path.count("/"), default=name)
    return None


def _follows(path: str, parts: list[str]) -> bool:
    """Whether the layers of a path stand in this order among the parts of an operation."""
    rest = iter(re.sub(r"_\d+$", "", part) for part in parts)
    return all(any(re.sub(r"_\d+$", "", wanted) == part for part in rest) for wanted in path.split("/")[1:])


def _layers(model: Any, path: str = "", depth: int = 0) -> Iterator[tuple[str, str]]:
    """(name, path) of every layer, nested ones included, in Keras's terms but without Keras."""
    here = f"{path}/{getattr(model, 'name', '')}".strip("/")
    children = getattr(model, "layers", None) or getattr(model, "_layers", None) or ()
    for layer in children if depth < 20 else ():
        name = str(getattr(layer, "name", ""))
        yield name, f"{here}/{name}"
        yield from _layers(layer, here, depth + 1)
