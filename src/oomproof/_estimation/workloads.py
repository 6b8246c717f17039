"""What a step of a model is given, from the model itself: shapes and dtypes of inputs and targets."""

from __future__ import annotations

import dataclasses
import numbers
from collections.abc import Mapping
from typing import Any

import keras
from keras import tree

from oomproof._backends.base import Backend
from oomproof._backends.common.call_graph import graph_of
from oomproof._backends.common.model import overrides
from oomproof._compat.keras import compute_output_spec
from oomproof._estimation import naming
from oomproof._records.run import Phase
from oomproof._records.trace import Buffer, Spec, Target, Trace, Workload
from oomproof._records.units import tensor_bytes
from oomproof.errors import UnsupportedModelError

InputShape = Any


def describe(
    model: Any, batch_size: int, phase: Phase, jit: bool, target: Target, input_shape: InputShape = None
) -> Workload:
    """The step that `fit`, `evaluate` or `predict` would run with batches of this size."""
    x = inputs_of(model, batch_size, input_shape)
    y = None if phase == "predict" else targets_of(model, x)
    return Workload(x, y, phase, jit, target)


def batch_bytes(workload: Workload, batch_size: int | None = None) -> int:
    """Bytes of a batch like the one of the workload, with so many samples."""
    leaves = [leaf for leaf in tree.flatten((workload.x, workload.y)) if leaf is not None]
    return sum(tensor_bytes((batch_size or leaf.shape[0], *leaf.shape[1:]), leaf.dtype) for leaf in leaves)


def in_words(workload: Workload) -> str:
    """What a step is given, such as `"x (32, 16) float32, y (32,) int32"`."""
    given = {"x": workload.x, "y": workload.y}
    specs = {name: [leaf for leaf in tree.flatten(part) if leaf is not None] for name, part in given.items()}
    return ", ".join(f"{name} {leaf.shape} {leaf.dtype}" for name, leaves in specs.items() for leaf in leaves)


def with_next_batch(trace: Trace, workload: Workload, batch_size: int, backend: Backend) -> Trace:
    """The step as part of `fit`, with the next batch where Keras puts that on the GPU ahead of time."""
    if not backend.traits.prefetches_batch or not workload.target.gpu:
        return trace
    ahead = Buffer(batch_bytes(workload, batch_size), -1, len(trace.ops), "input", "")
    return dataclasses.replace(trace, buffers=(*trace.buffers, ahead))


def check_batch_size(batch_size: object, name: str = "batch_size") -> int:
    if isinstance(batch_size, bool) or not isinstance(batch_size, numbers.Integral):
        raise TypeError(f"Expected `{name}` to be an int. Received: {name}={batch_size!r}")
    if batch_size < 1:
        raise ValueError(f"Expected `{name}` to be at least 1. Received: {name}={batch_size!r}")
    return int(batch_size)


# Inputs


def inputs_of(model: Any, batch_size: int, input_shape: InputShape) -> Any:
    """The model's inputs with a `Spec` in the place of each tensor."""
    declared = _declared(model)
    if declared is None:
        if input_shape is None:
            raise ValueError(
                f"{_name(model)} does not say what its inputs look like: it has no `Input` and has never been called. "
                "Give the shape of a sample, without the batch: input_shape=(224, 224, 3), --input-shape 224,224,3 "
                "(or 128:int32 for a sequence of 128 numbers of another dtype than float32)."
            )
        declared = tree.map_structure_up_to(_outline(input_shape), lambda leaf: _Declared("input", leaf), input_shape)
        return tree.map_structure(lambda leaf: leaf.spec(batch_size, None), declared)
    leaves = tree.flatten(declared)
    given = _given_for(leaves, input_shape)
    specs = [leaf.spec(batch_size, shape, len(leaves) > 1) for leaf, shape in zip(leaves, given, strict=True)]
    return tree.pack_sequence_as(declared, specs)


class _Declared:
    """An input as the model declares it.

    Args:
        name: Its name.
        shape: Something with a shape, batch first, or the shape of a sample.
    """

    def __init__(self, name: str, shape: Any) -> None:
        self.name = name
        self.batch: int | None = None
        self.dtype: str | None = None
        if hasattr(shape, "shape"):
            self.batch, *rest = shape.shape
            self.shape = tuple(rest)
            self.dtype = None if shape.dtype is None else keras.backend.standardize_dtype(shape.dtype)
        else:
            sizes = tuple(shape) if isinstance(shape, list | tuple) else (shape,)
            if sizes and isinstance(sizes[-1], str):
                self.dtype = _dtype(sizes[-1])
                sizes = sizes[:-1]
            self.shape = sizes

    def spec(self, batch_size: int, given: Any, one_of_several: bool = False) -> Spec:
        shape, dtype = self.shape, self.dtype
        if given is not None:
            asked = _Declared(self.name, given)
            if len(asked.shape) != len(shape) or any(
                known is not None and known != size for known, size in zip(shape, asked.shape, strict=True)
            ):
                raise ValueError(
                    f"Input {self.name!r} of the model has the shape {_text(shape)}, without the batch. "
                    f"Received: input_shape={_text(asked.shape)}, which does not agree with it."
                )
            shape = asked.shape
            # Keras remembers of a call without `Input` which shape it had, not which dtype.
            dtype = asked.dtype or dtype
        if any(size is None for size in shape):
            missing = [index for index, size in enumerate(shape) if size is None]
            example = tuple(size or 512 for size in shape)
            in_python, as_option = _text(example), ",".join(map(str, example))
            if one_of_several:
                in_python, as_option = f'{{"{self.name}": {in_python}}}', f"{self.name}={as_option}"
            raise ValueError(
                f"Input {self.name!r} of the model has the shape {_text(shape)}, without the batch: "
                f"{'dimension' if len(missing) == 1 else 'dimensions'} {', '.join(map(str, missing))} "
                f"can be anything, and memory depends on it. Give the largest you will train with: "
                f"input_shape={in_python}, --input-shape {as_option}."
            )
        if any(isinstance(size, bool) or not isinstance(size, numbers.Integral) or size < 1 for size in shape):
            raise ValueError(
                f"Expected sizes of at least 1, such as (128,), or (128, 'int32') with a dtype. "
                f"Received: input_shape={_text(shape)}"
            )
        if self.batch is not None and self.batch != batch_size:
            raise ValueError(
                f"Input {self.name!r} of the model has a fixed batch size of {self.batch}. "
                f"Received: batch_size={batch_size}"
            )
        return Spec((batch_size, *(int(size) for size in shape)), dtype or "float32")


def _declared(model: Any) -> Any:
    """Inputs in the structure they are passed in, or `None` where the model knows nothing about them."""
    functional = model if hasattr(model, "_inputs_struct") else getattr(model, "_functional", None)
    if functional is not None:
        return tree.map_structure(lambda tensor: _Declared(tensor.name, tensor), functional._inputs_struct)
    shapes = getattr(model, "_build_shapes_dict", None)
    if not shapes or len(shapes) != 1:
        return None
    (shape,) = shapes.values()
    if isinstance(shape, Mapping):
        return {name: _Declared(name, tuple(one[1:])) for name, one in shape.items()}
    if shape and isinstance(shape[0], list | tuple):
        return [_Declared(f"input {index}", tuple(one[1:])) for index, one in enumerate(shape)]
    return _Declared("input", tuple(shape[1:]))


def _outline(shape: Any) -> Any:
    """The structure of `input_shape` above its shapes."""
    if isinstance(shape, Mapping):
        return dict.fromkeys(shape, 0)
    if isinstance(shape, list):
        return [0 for _ in shape]
    return 0


def _given_for(leaves: list[_Declared], input_shape: Any) -> list[Any]:
    """What the user says of each input, or `None` for those nothing is said of."""
    if input_shape is None:
        return [None] * len(leaves)
    if isinstance(input_shape, Mapping):
        unknown = set(input_shape) - {leaf.name for leaf in leaves}
        if unknown:
            raise ValueError(
                f"The model has no input {sorted(unknown)[0]!r}. Its inputs: {', '.join(leaf.name for leaf in leaves)}."
            )
        return [input_shape.get(leaf.name) for leaf in leaves]
    shapes = input_shape if isinstance(input_shape, list) else [input_shape]
    if len(shapes) != len(leaves):
        raise ValueError(
            f"The model has {len(leaves)} inputs ({', '.join(leaf.name for leaf in leaves)}). "
            f"Received: {len(shapes)} shapes. Name those you mean: "
            f'input_shape={{"{leaves[0].name}": …}}, --input-shape {leaves[0].name}=…'
        )
    return list(shapes)


def _dtype(name: str) -> str:
    try:
        return str(keras.backend.standardize_dtype(name))
    except ValueError:
        raise ValueError(f'Expected a dtype such as "int32" after the shape. Received: {name!r}') from None


def _text(shape: tuple[Any, ...]) -> str:
    return (
        "(" + ", ".join("?" if size is None else str(size) for size in shape) + ("," if len(shape) == 1 else "") + ")"
    )


def _name(model: Any) -> str:
    return str(getattr(model, "name", type(model).__name__))


# Targets


def targets_of(model: Any, x: Any) -> Any:
    """What the model's losses compare its outputs with, or `None` for a model that has no such loss."""
    compiled = model._compile_loss
    if compiled is not None:
        outputs = _outputs(model, x)
        return tree.map_structure(_target, outputs, _losses_like(compiled._user_loss, outputs, model))
    if not overrides(model, "compute_loss"):
        return None
    outputs = _outputs(model, x)
    like = [tree.map_structure(kind, outputs) for kind in (_dense, _sparse)]
    # What a loss of the user's own takes is not written anywhere, so it is tried.
    return next((y for y in (None, *like) if _computes(model.compute_loss, x, y, outputs)), like[0])


def _outputs(model: Any, x: Any) -> Any:
    declared = getattr(graph_of(model), "_outputs_struct", None)
    if declared is not None and all(None not in tensor.shape[1:] for tensor in tree.flatten(declared)):
        # Known without another look at each layer, which takes a third of a second for a large model.
        samples = next(spec for spec in tree.flatten(x) if spec is not None).shape[0]
        return tree.map_structure(lambda tensor: Spec((samples, *tensor.shape[1:]), str(tensor.dtype)), declared)
    try:
        found = compute_output_spec(model, _symbols(x))
    except Exception as error:
        raise UnsupportedModelError(
            f"{_name(model)} could not be called with inputs of the shape "
            f"{', '.join(str(spec.shape) for spec in tree.flatten(x))}: {naming.first_line(error)}"
        ) from error
    return tree.map_structure(lambda tensor: Spec(tuple(tensor.shape), str(tensor.dtype)), found)


def _losses_like(loss: Any, outputs: Any, model: Any) -> Any:
    """The loss of each output, in the structure of the outputs."""
    count = len(tree.flatten(outputs))
    if isinstance(loss, Mapping) and isinstance(outputs, Mapping):
        return {name: tree.map_structure(lambda _, name=name: _Loss(loss.get(name)), outputs[name]) for name in outputs}
    if isinstance(loss, Mapping):
        flat = [loss.get(name) for name in getattr(model, "output_names", None) or ()]
    elif isinstance(loss, list | tuple):
        flat = tree.flatten(loss) if any(tree.is_nested(one) for one in loss) else list(loss)
    else:
        flat = [loss] * count
    if len(flat) != count:
        flat = [None] * count
    return tree.pack_sequence_as(outputs, [_Loss(one) for one in flat])


class _Loss:
    """A loss as a leaf: some are lists of their own."""

    def __init__(self, loss: Any) -> None:
        kind = loss if isinstance(loss, str) else getattr(loss, "__name__", type(loss).__name__)
        self.sparse = "sparse" in kind.lower()
        owner = loss if hasattr(loss, "__name__") else type(loss)
        self.own = loss if callable(loss) and not str(owner.__module__).startswith("keras.") else None


def _target(output: Spec, loss: _Loss) -> Spec:
    if loss.sparse:
        return _sparse(output)
    if loss.own is not None and not _computes(loss.own, _dense(output), output):
        # Most often classes, handed on to one of Keras's own.
        return _sparse(output) if _computes(loss.own, _sparse(output), output) else _dense(output)
    return _dense(output)


def _dense(output: Spec) -> Spec:
    return Spec(output.shape, "float32")


def _sparse(output: Spec) -> Spec:
    return Spec(output.shape[:-1], "int32")


def _computes(loss: Any, *given: Any) -> bool:
    """Whether a loss can be computed from such tensors. Nothing is."""
    try:
        compute_output_spec(loss, *(_symbols(each) for each in given))
    except Exception:
        return False
    return True


def _symbols(specs: Any) -> Any:
    return tree.map_structure(lambda spec: spec if spec is None else keras.KerasTensor(spec.shape, spec.dtype), specs)
