"""Proofs on disk, so that each is paid for once per model, loss, optimizer, shape of data and version."""

from __future__ import annotations

import json
import pathlib
from typing import Any

from keras import tree

from oomproof._backends.base import Backend
from oomproof._backends.common.model import layers, own_modules
from oomproof._planning import plan_cache

# Counted up when proofs are made by other rules.
_RULES = 3


class ProofCache:
    """What was proven of one model.

    Args:
        backend: The framework.
        model: Built and compiled.
    """

    def __init__(self, backend: Backend, model: Any) -> None:
        self._backend = backend
        self._model = model

    def key(self, data: Any, cut: bool, recompute: tuple[str, ...], head: str | None) -> str | None:
        """A name for everything a proof depends on; `None` where nobody can tell all of that.

        What code of the user's does may depend on anything: on what it was given, on its module, on the environment.
        """
        model = self._model
        try:
            config = model.get_config()
        except NotImplementedError:
            return None  # How Keras says that a layer has settings which it does not know.
        if _has_own_code(model) or not _is_kerass_alone(config):
            return None
        return plan_cache.name_of(
            {
                **plan_cache.facts(self._backend, model),
                "rules": _RULES,
                # Whole names: two classes of one name may be made in two functions of a file.
                "classes": [f"{type(layer).__module__}.{type(layer).__qualname__}" for layer in layers(model)],
                "losses": [_settings(thing) for thing in _losses_and_metrics(model)],
                "jit": [bool(model.jit_compile), bool(model.run_eagerly)],
                "data": [_shape(leaf) for leaf in tree.flatten(data)],
                "way": [cut, recompute, head],
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


def _has_own_code(model: Any) -> bool:
    """Whether a layer, the optimizer, a loss or a metric is not Keras's, or has a function that is not."""
    things = [*layers(model), model.optimizer, *_losses_and_metrics(model)]
    things += [getattr(thing, name, None) for thing in things for name in ("fn", "_fn", "function")]
    return any(True for thing in things for _ in own_modules(thing))


def _is_kerass_alone(config: Any) -> bool:
    """Whether a configuration names nothing but Keras's own: an activation, for one, may be any function."""
    if isinstance(config, dict):
        named = "class_name" in config and "config" in config
        if named and not str(config.get("module", "keras")).startswith("keras"):
            return False
        return all(map(_is_kerass_alone, config.values()))
    return not isinstance(config, (list, tuple)) or all(map(_is_kerass_alone, config))
