"""What a compiled model makes in its first step: copies, to trace a step without making it; and making none of it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import keras
from keras import tree

from oomproof._compat.keras import CompileLoss, CompileMetrics


@contextlib.contextmanager
def copies_of_unbuilt(model: Any) -> Iterator[bool]:
    """Copies in the place of those parts of a compiled model that are not built. Yields whether there are any."""
    attributes = vars(model)
    copies = {"optimizer": _optimizer, "_compile_loss": _loss, "_compile_metrics": _metrics}
    originals = {name: attributes.get(name) for name in copies}
    unbuilt = {name: part for name, part in originals.items() if part is not None and not part.built}
    try:
        # Not through `__setattr__`, which would have Keras track them as parts of the model.
        attributes.update({name: copies[name](part) for name, part in unbuilt.items()})
        yield bool(unbuilt)
    finally:
        attributes.update(unbuilt)


@contextlib.contextmanager
def left_unbuilt(optimizer: Any) -> Iterator[None]:
    """Nobody builds the optimizer, whose slots take memory."""
    built, optimizer.built = optimizer.built, True
    try:
        yield
    finally:
        optimizer.built = built


def _optimizer(optimizer: Any) -> Any:
    return type(optimizer).from_config(optimizer.get_config())


def _loss(loss: Any) -> Any:
    return CompileLoss(loss._user_loss, loss._user_loss_weights, loss.reduction, loss.output_names)


def _metrics(metrics: Any) -> Any:
    users = [tree.map_structure(_metric, given) for given in (metrics._user_metrics, metrics._user_weighted_metrics)]
    return CompileMetrics(*users, output_names=metrics.output_names)


def _metric(metric: Any) -> Any:
    """Some metrics make their variables when they are first updated, so a user's own must not be."""
    if not isinstance(metric, keras.Metric):
        return metric
    try:
        return type(metric).from_config(metric.get_config())
    except (NotImplementedError, TypeError):
        # A class of the user's whose configuration says too little has its variables from the start, as Keras asks.
        return metric
