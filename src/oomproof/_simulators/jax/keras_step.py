"""The step Keras would compile, and the shapes it is called with. Nothing is run, and the model stays as it was."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import keras
import numpy as np

from oomproof._backends.common.recompute import recomputing
from oomproof._backends.common.unbuilt import copies_of_unbuilt
from oomproof._backends.jax.engine import JaxEngine
from oomproof._compat.keras import VARIABLE, global_state
from oomproof._records.trace import Category, Spec, Workload
from oomproof._simulators.jax.cudnn import traced_for
from oomproof._simulators.xla.writer import Role


@dataclasses.dataclass(frozen=True)
class KerasStep:
    """A function of state and batch, as Keras compiles it, and shapes in the place of both.

    Attributes:
        function: `(state, data) -> (logs or outputs, state)`. Keras gives the state away when it calls it.
        state: Lists of `jax.ShapeDtypeStruct`, in the order of Keras's state.
        data: What Keras's step unpacks.
        roles: What each leaf of state and data is, in their order.
        notes: What had to be assumed; complete once the function was traced.
    """

    function: Callable[[Any, Any], Any]
    state: Any
    data: Any
    roles: tuple[Role, ...]
    notes: Sequence[str] = ()


@contextlib.contextmanager
def keras_step(model: Any, workload: Workload) -> Iterator[KerasStep]:
    """The step of a workload. It can be traced inside the context, in which the model has stand-ins for what it lacks.

    A model that was compiled but never trained has no optimizer slots and no built metrics yet. Copies of optimizer,
    loss and metrics take their place and are built without values, so that nothing is allocated for them.
    """
    if workload.phase != "predict":
        model._assert_compile_called()
    if not all(layer.built for layer in model._flatten_layers()):
        raise ValueError(
            f"The weights of model {model.name!r} are not there yet, so nothing can be said about its memory. Build it "
            "first: call it on a batch, or `model.build(input_shape)`."
        )
    data = _batch(workload)
    notes: list[str] = []
    with copies_of_unbuilt(model) as replaced, _uncalled(model), traced_for(workload.target, notes):
        if replaced and workload.phase != "predict":
            with _variables_without_values():
                model._symbolic_build(data_batch=data)
        variables = _variables(model, workload.phase)
        state = tuple([_shape(v) for v in group] for group in variables)
        inputs = [Role("input", "")] * len(jax.tree.leaves(data))
        roles = (*_roles(model, variables), *inputs)
        with recomputing(model, workload.recompute, JaxEngine(model)):
            yield KerasStep(_function(model, workload.phase), state, data, roles, notes)


def _batch(workload: Workload) -> Any:
    def shape(spec: Spec) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(spec.shape, jax.dtypes.canonicalize_dtype(spec.dtype))

    is_spec = {"is_leaf": lambda leaf: isinstance(leaf, Spec)}
    x = jax.tree.map(shape, workload.x, **is_spec)
    if workload.y is None or workload.phase == "predict":
        return (x,)
    return x, jax.tree.map(shape, workload.y, **is_spec)


def _shape(variable: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(variable.shape, jax.dtypes.canonicalize_dtype(variable.dtype))


def _function(model: Any, phase: str) -> Callable[[Any, Any], Any]:
    if phase == "train":
        return model.train_step  # type: ignore[no-any-return]
    if phase == "test":
        return model.test_step  # type: ignore[no-any-return]

    def predict(state: Any, data: Any) -> Any:
        outputs, non_trainable = model.predict_step(state, data)
        return outputs, (state[0], non_trainable)

    return predict


@contextlib.contextmanager
def _uncalled(model: Any) -> Iterator[None]:
    """Layers note that they were called. Being traced is not to count."""
    noted = [(vars(layer), layer._called) for layer in model._flatten_layers() if "_called" in vars(layer)]
    try:
        yield
    finally:
        for attributes, called in noted:
            attributes["_called"] = called


@contextlib.contextmanager
def _variables_without_values() -> Iterator[None]:
    """Variables made inside have a shape and a dtype and never get a value."""
    waiting = global_state.get_global_attribute("uninitialized_variables")
    global_state.set_global_attribute("uninitialized_variables", [])
    try:
        with keras.StatelessScope(initialize_variables=False), VARIABLE.to(_without_value):
            yield
    finally:
        global_state.set_global_attribute("uninitialized_variables", waiting)


def _without_value(
    original: Any, variable: Any, initializer: Any, shape: Any = None, dtype: Any = None, *rest: Any, **options: Any
) -> None:
    """Some optimizers give a variable its value, where Keras wants to be told how to make it."""
    if not (callable(initializer) or isinstance(initializer, str)):
        value = np.asarray(initializer)
        shape, dtype = value.shape, dtype or str(jax.dtypes.canonicalize_dtype(value.dtype))
        initializer = "zeros"
    original(variable, initializer, shape, dtype, *rest, **options)


def _variables(model: Any, phase: str) -> list[list[Any]]:
    groups = [list(model.trainable_variables), list(model.non_trainable_variables)]
    if phase == "train":
        groups.append(list(model.optimizer.variables))
    if phase != "predict":
        groups.append(list(model.metrics_variables))
    return groups


def _roles(model: Any, groups: list[list[Any]]) -> Iterator[Role]:
    owners = _owners(model)
    # Keras calls a slot after its weight's path, with something before and after.
    weights = {variable.path.replace("/", "_"): owners.get(id(variable), "") for variable in groups[0]}
    categories: tuple[Category, ...] = ("weights", "weights", "optimizer", "temporary")
    if len(groups) < len(categories):
        categories = ("weights", "weights", "temporary")
    for category, group in zip(categories, groups, strict=False):
        for variable in group:
            if category == "optimizer":
                named = [name for name in weights if name in variable.name]
                yield Role(category, weights[max(named, key=len)] if named else "")
            else:
                yield Role(category, owners.get(id(variable), ""))


def layer_paths(model: Any) -> dict[str, Any]:
    """Every layer at any depth by its path: the names of the layers it is inside of, below the model, and its own."""
    paths: dict[str, Any] = {}

    def visit(layer: Any, outer: tuple[str, ...]) -> None:
        for child in layer._flatten_layers(include_self=False, recursive=False):
            path = (*outer, child.name)
            if "/".join(path) not in paths:
                paths["/".join(path)] = child
                visit(child, path)

    visit(model, ())
    return paths


def _owners(model: Any) -> dict[int, str]:
    """Path of the innermost layer that has each variable."""
    owners: dict[int, str] = {}
    for path, layer in sorted(layer_paths(model).items(), key=lambda item: -item[0].count("/")):
        for variable in layer.variables:
            owners.setdefault(id(variable), path)
    return owners
