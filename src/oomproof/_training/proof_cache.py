"""Proofs on disk, so that each is paid for once per model, loss, optimizer, shape of data and version."""

from __future__ import annotations

import hashlib
import json
import pathlib
import sys
from collections.abc import Iterator
from typing import Any

from keras import tree

from oomproof._backends.base import Backend
from oomproof._backends.common.model import layers, own_modules
from oomproof._planning import plan_cache

# Counted up when proofs are made by other rules.
_RULES = 2


class ProofCache:
    """What was proven of one model.

    Args:
        backend: The framework.
        model: Built and compiled.
    """

    def __init__(self, backend: Backend, model: Any) -> None:
        self._backend = backend
        self._model = model

    def key(self, data: Any, cut: bool, recompute: tuple[str, ...]) -> str | None:
        """A name for everything a proof depends on; `None` where code of the user's is in no file."""
        code = list(_code(self._model))
        if None in code:
            return None
        return plan_cache.name_of(
            {
                **plan_cache.facts(self._backend, self._model),
                "rules": _RULES,
                # Whole names: two classes of one name may be made in two functions of a file.
                "classes": [f"{type(layer).__module__}.{type(layer).__qualname__}" for layer in layers(self._model)],
                "losses": [_settings(thing) for thing in _losses_and_metrics(self._model)],
                "jit": [bool(self._model.jit_compile), bool(self._model.run_eagerly)],
                "data": [_shape(leaf) for leaf in tree.flatten(data)],
                "way": [cut, recompute],
                "code": sorted({name for name in code if name is not None}),
            }
        )

    def recall(self, key: str) -> dict[str, Any] | None:
        try:
            known: dict[str, Any] = json.loads((folder() / f"{key}.json").read_text())
            return known if {"word", "why", "learnt"} <= known.keys() else None
        except (OSError, ValueError, AttributeError):
            return None

    def remember(self, key: str, facts: dict[str, Any]) -> None:
        plan_cache.write(folder() / f"{key}.json", facts)


def folder() -> pathlib.Path:
    return plan_cache.folder().parent / "proofs"


def _shape(leaf: Any) -> Any:
    """Of one sample: how many there are in a batch changes nothing."""
    return None if leaf is None else [list(leaf.shape)[1:], str(leaf.dtype)]


def _losses_and_metrics(model: Any) -> list[Any]:
    losses = model._compile_loss._flat_losses if model._compile_loss is not None else ()
    metrics = model._compile_metrics.metrics if model._compile_metrics is not None else ()
    return [*(loss for _, loss, _, _ in losses or ()), *metrics]


def _settings(thing: Any) -> Any:
    function = getattr(thing, "fn", getattr(thing, "_fn", None))
    options = {name: str(value) for name, value in getattr(thing, "_fn_kwargs", {}).items()}
    return [type(thing).__name__, getattr(thing, "reduction", None), getattr(function, "__qualname__", None), options]


def _code(model: Any) -> Iterator[str | None]:
    """What is in the files that the user's own layers, losses and metrics are written in; `None` for one in no file.

    Whole files: what a function does may depend on anything in its module.
    """
    things = [*layers(model), model.optimizer, *_losses_and_metrics(model)]
    things += [getattr(thing, name, None) for thing in things for name in ("fn", "_fn", "function")]
    for module in {name for thing in things for name in own_modules(thing)}:
        path = getattr(sys.modules.get(module), "__file__", None)
        try:
            yield None if path is None else hashlib.sha256(pathlib.Path(path).read_bytes()).hexdigest()
        except OSError:
            yield None
