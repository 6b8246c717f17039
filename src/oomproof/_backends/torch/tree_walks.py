"""Keras's walks through nested data, without the cycles they leave behind on torch.

Each call of a layer flattens its arguments, and each call of a model walks through its own. On torch a closure that
refers to itself is left over each time and holds them, so activations stay until Python's garbage collector comes by,
long after the backward pass is done with them. What a segment made when it was computed again must be gone before the
next one is.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from oomproof._compat.torch import DICTS_IN_ORDER, TRAVERSE, dict_in_order, is_leaf


def _in_order(original: Callable[..., Any], structure: Any) -> Any:
    """What `_dict_to_ordered_dict` returns."""
    if type(structure) is dict:
        return {key: structure[key] for key in sorted(structure)}
    if type(structure) in (tuple, list):
        return type(structure)([_in_order(original, child) for child in structure])
    return structure if is_leaf(structure) else original(structure)


def _traversed(original: Callable[..., Any], func: Callable[[Any], Any], structure: Any, top_down: bool = True) -> Any:
    """What `traverse` returns."""
    if type(structure) not in (dict, tuple, list) and not is_leaf(structure):
        return original(func, structure, top_down=top_down)
    structure = dict_in_order(structure)
    if top_down:
        found = func(structure)
        if found is None:
            return _traversed_children(original, func, structure, top_down)
    else:
        children = _traversed_children(original, func, structure, top_down)
        found = func(children)
        if found is None:
            return children
    return None if isinstance(found, type) and found.__name__ == "MAP_TO_NONE" else found


def _traversed_children(
    original: Callable[..., Any], func: Callable[[Any], Any], structure: Any, top_down: bool
) -> Any:
    if type(structure) is dict:
        return {key: _traversed(original, func, child, top_down) for key, child in structure.items()}
    if type(structure) in (tuple, list):
        return type(structure)([_traversed(original, func, child, top_down) for child in structure])
    return structure


@contextlib.contextmanager
def without_cycles() -> Iterator[None]:
    """While it lasts, Keras lets go of what layers were called with as soon as they return, in this thread."""
    if DICTS_IN_ORDER is None or TRAVERSE is None:  # A Keras that walks in another way.
        yield
        return
    with DICTS_IN_ORDER.to(_in_order), TRAVERSE.to(_traversed):
        yield
