"""A model in fake tensors: shapes without data in the place of every value, and everything put back afterwards."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import keras
import torch

from oomproof._compat.keras import KerasSaveable, global_state
from oomproof._compat.names import is_kerass

_CONTAINERS = (list, dict, set)


class Snapshot:
    """Everything a step may change on a model and on what belongs to it, down to the content of lists.

    A step builds optimizers and metrics, counts names, remembers masks and parents. Rather than know all of that, the
    attributes of every object of Keras and torch that can be reached are noted down. Values are not copied: nobody
    writes to them while fake ones are in their place.

    Attributes:
        variables: Every Keras variable that was found.
        modules: Every torch module.
    """

    def __init__(self, model: Any) -> None:
        self.variables: list[Any] = []
        self.modules: list[Any] = []
        self._attributes: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._contents: list[tuple[Any, Any]] = []
        # Keras counts names there, and keeps the seeds of layers that have none of their own.
        keras_globals = vars(global_state.GLOBAL_STATE_TRACKER)
        self._walk([model, keras_globals])

    def _walk(self, pending: list[Any]) -> None:
        seen: set[int] = set()
        while pending:
            thing = pending.pop()
            if id(thing) in seen:
                continue
            seen.add(id(thing))
            if isinstance(thing, _CONTAINERS):
                # Through the plain type: Keras's tracked containers tell others of every change.
                plain = next(kind for kind in _CONTAINERS if isinstance(thing, kind))
                self._contents.append((thing, plain(thing)))
            if isinstance(thing, dict):
                pending.extend(thing.values())
            elif isinstance(thing, list | set | tuple):
                pending.extend(thing)
            if _has_state(thing):
                self._attributes.append((vars(thing), dict(vars(thing))))
                pending.extend(vars(thing).values())
            if isinstance(thing, keras.Variable):
                self.variables.append(thing)
            elif isinstance(thing, torch.nn.Module):
                self.modules.append(thing)

    def put_back(self) -> None:
        for attributes, before in self._attributes:
            attributes.clear()
            attributes.update(before)
        for container, before in self._contents:
            if isinstance(container, list):
                list.__setitem__(container, slice(None), before)
            elif isinstance(container, dict):
                dict.clear(container)
                dict.update(container, before)
            else:
                set.clear(container)
                set.update(container, before)


def _has_state(thing: Any) -> bool:
    if isinstance(thing, type) or not hasattr(thing, "__dict__"):
        return False
    return isinstance(thing, KerasSaveable | torch.nn.Module) or is_kerass(type(thing))


@contextlib.contextmanager
def fake_values(model: Any) -> Iterator[Snapshot]:
    """Puts fake tensors in the place of all values of a model. To be entered within a fake tensor mode."""
    snapshot = Snapshot(model)
    try:
        fakes: dict[int, Any] = {}
        for variable in snapshot.variables:
            if variable._value is not None:
                variable._value = _fake(variable._value, fakes)
        for module in snapshot.modules:
            for kept in (module._parameters, module._buffers):
                kept.update({name: _fake(value, fakes) for name, value in kept.items() if value is not None})
        yield snapshot
    finally:
        snapshot.put_back()


def _fake(value: Any, known: dict[int, Any]) -> Any:
    """The stand-in of a tensor: always the same one, since modules and variables share parameters."""
    if id(value) not in known:
        empty = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)
        if isinstance(value, torch.nn.Parameter):
            empty = torch.nn.Parameter(empty, requires_grad=value.requires_grad)
        known[id(value)] = empty
    return known[id(value)]
