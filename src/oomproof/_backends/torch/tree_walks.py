"""Keras's walks through nested data, without the cycles they leave behind on torch.

Each call of a layer flattens its arguments, and each call of a model walks through its own. On torch a closure that
refers to itself is left over each time and holds them, so activations stay until Python's garbage collector comes by,
long after the backward pass is done with them. What a segment made when it was computed again must be gone before the
next one is.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

from keras.src.tree import torchtree_impl

_WALKS = ("_dict_to_ordered_dict", "traverse")
_original: dict[str, Any] = {name: getattr(torchtree_impl, name, None) for name in _WALKS}
_lock = threading.Lock()
_users = 0


def _in_order(structure: Any) -> Any:
    """What `_dict_to_ordered_dict` returns."""
    if type(structure) is dict:
        return {key: structure[key] for key in sorted(structure)}
    if type(structure) in (tuple, list):
        return type(structure)([_in_order(child) for child in structure])
    return structure if torchtree_impl._tree_is_leaf(structure) else _original["_dict_to_ordered_dict"](structure)


def _traversed(func: Callable[[Any], Any], structure: Any, top_down: bool = True) -> Any:
    """What `traverse` returns."""
    if type(structure) not in (dict, tuple, list) and not torchtree_impl._tree_is_leaf(structure):
        return _original["traverse"](func, structure, top_down=top_down)
    structure = _in_order(structure)
    if top_down:
        found = func(structure)
        if found is None:
            return _traversed_children(func, structure, top_down)
    else:
        children = _traversed_children(func, structure, top_down)
        found = func(children)
        if found is None:
            return children
    return None if isinstance(found, type) and found.__name__ == "MAP_TO_NONE" else found


def _traversed_children(func: Callable[[Any], Any], structure: Any, top_down: bool) -> Any:
    if type(structure) is dict:
        return {key: _traversed(func, child, top_down) for key, child in structure.items()}
    if type(structure) in (tuple, list):
        return type(structure)([_traversed(func, child, top_down) for child in structure])
    return structure


@contextlib.contextmanager
def without_cycles() -> Iterator[None]:
    """While it lasts, Keras lets go of what layers were called with as soon as they return."""
    if None in _original.values():  # A Keras that walks in another way.
        yield
        return
    global _users
    with _lock:
        _users += 1
        torchtree_impl._dict_to_ordered_dict = _in_order
        torchtree_impl.traverse = _traversed
    try:
        yield
    finally:
        with _lock:
            _users -= 1
            # Models may be trained side by side: the last one puts Keras's own back.
            for name, function in _original.items() if not _users else ():
                setattr(torchtree_impl, name, function)
