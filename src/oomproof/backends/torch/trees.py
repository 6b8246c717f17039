"""Keras's walk through nested data, without the cycles it leaves behind on torch.

Each call of a layer flattens its arguments. On torch a closure that refers to itself is left over each time and holds
them, so activations stay until Python's garbage collector comes by, long after the backward pass is done with them.
What a stretch made when it was computed again must be gone before the next one is.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from keras.src.tree import torchtree_impl

_original = getattr(torchtree_impl, "_dict_to_ordered_dict", None)


def _in_order(structure: Any) -> Any:
    """What `_dict_to_ordered_dict` returns, for what layers are usually given without its closures."""
    kind = type(structure)
    if kind is tuple or kind is list:
        return kind(_in_order(child) for child in structure)
    if kind is dict:
        return {key: structure[key] for key in sorted(structure)}
    if torchtree_impl._tree_is_leaf(structure):
        return structure
    assert _original is not None
    return _original(structure)


@contextlib.contextmanager
def without_cycles() -> Iterator[None]:
    """While it lasts, Keras lets go of what layers were called with as soon as they return."""
    if _original is None:  # A Keras that walks in another way.
        yield
        return
    before = torchtree_impl._dict_to_ordered_dict
    torchtree_impl._dict_to_ordered_dict = _in_order
    try:
        yield
    finally:
        torchtree_impl._dict_to_ordered_dict = before
