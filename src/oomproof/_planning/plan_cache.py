"""Plans on disk, by everything they depend on, so that a second run of a script starts at once."""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import json
import logging
import os
import pathlib
import tempfile
from typing import Any

import platformdirs
from keras import tree

from oomproof._backends.base import Backend
from oomproof._records.plan import Plan
from oomproof._records.trace import Workload
from oomproof._version import __version__

logger = logging.getLogger("oomproof")

# How allocators and compilers are told in the environment to work in another way.
_ENVIRONMENT = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "TF_GPU_ALLOCATOR", "TF_XLA_FLAGS", "XLA_FLAGS")
# Counted up when plans are made by other rules, so that those of before are not taken for their own.
_RULES = 7


def folder() -> pathlib.Path:
    """Where plans are kept: `$OOMPROOF_CACHE_DIR`, or a folder of the user's cache."""
    named = os.environ.get("OOMPROOF_CACHE_DIR")
    return pathlib.Path(named or platformdirs.user_cache_dir("oomproof")) / "plans"


def key(backend: Backend, model: Any, workload: Workload, limit: int, *settings: Any) -> str:
    """A name for everything a plan depends on."""
    return name_of(
        {
            **facts(backend, model),
            "rules": _RULES,
            "workload": dataclasses.asdict(workload),
            "limit": limit,
            "settings": settings,
            "environment": [os.environ.get(name) for name in _ENVIRONMENT],
        }
    )


def facts(backend: Backend, model: Any) -> dict[str, Any]:
    """What makes a step of a model: versions, layers, weights, loss, optimizer."""
    return {
        "versions": [__version__, backend.name, backend.versions()],
        "model": _description(model),
        "optimizer": _settings_of(model.optimizer),
    }


def name_of(facts: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:32]


def recall(name: str) -> Plan | None:
    try:
        return Plan.load(folder() / f"{name}.json")
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None  # Not there, or not what this version writes: make it anew.


def remember(name: str, plan: Plan) -> None:
    write(folder() / f"{name}.json", plan.to_dict())


def write(path: pathlib.Path, data: dict[str, Any]) -> None:
    """Whole or not at all: two runs, or two threads of one, may write the same file at once."""
    text, part = json.dumps(data), None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".part", delete=False) as file:
            part = pathlib.Path(file.name)
            file.write(text)
        part.replace(path)
    except OSError as error:
        logger.debug(f"oomproof: {path.name} is not remembered: {error}")
        if part is not None:
            part.unlink(missing_ok=True)


def forget() -> int:
    """Removes every plan; returns how many there were."""
    found = list(folder().glob("*.json"))
    for path in found:
        path.unlink(missing_ok=True)
    return len(found)


def _description(model: Any) -> Any:
    """What a model is: its layers, their settings and their weights, and its code where that is its own."""
    weights = [(v.path, list(v.shape), str(v.dtype), bool(v.trainable)) for v in model.variables]
    # A frozen layer may behave otherwise though it has no weight that would show it.
    policies = [
        (layer.path, layer.dtype_policy.name, type(layer).__name__, layer.trainable)
        for layer in model._flatten_layers()
    ]
    try:
        config = model.get_config()
    except NotImplementedError:
        config = None  # How Keras says that a model with code of its own has no configuration.
    try:
        code = None if type(model).__module__.startswith("keras.") else inspect.getsource(type(model))
    except (OSError, TypeError):
        code = None  # Typed in by hand, or built by C: then layers and weights have to tell models apart.
    return [weights, policies, str(config), code, tree.map_structure(_name, model.loss), bool(model.run_eagerly)]


def _settings_of(optimizer: Any) -> Any:
    config = {name: value for name, value in optimizer.get_config().items() if name != "learning_rate"}
    return [type(optimizer).__name__, str(config)]


def _name(loss: Any) -> str:
    """Not as it prints: functions and objects print where they lie."""
    return str(loss if loss is None or isinstance(loss, str) else getattr(loss, "__name__", type(loss).__name__))
