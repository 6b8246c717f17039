"""A built model computed in another precision, or compiled, with the weights and the optimizer it has."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import keras


@contextlib.contextmanager
def computed_in(model: Any, precision: str | None) -> Iterator[str]:
    """The model with another dtype policy for the time being, on every layer that has the usual kind of one.

    Layers that were given a policy of their own, such as a float32 head, keep it. Yields the name of the policy.
    """
    usual = policy_of(model)
    if precision is None or precision == usual.name:
        yield str(usual.name)
        return
    try:
        policy = keras.dtype_policies.get(precision)
    except ValueError as error:
        raise ValueError(
            'Expected `precision` to be a dtype policy such as "float32", "mixed_bfloat16" or "mixed_float16". '
            f"Received: precision={precision!r}"
        ) from error
    before = [
        (layer, layer.dtype_policy)
        for layer in model._flatten_layers()
        if layer.dtype_policy == usual or isinstance(layer, keras.Model)
    ]
    try:
        for layer, _ in before:
            layer._dtype_policy = policy
        yield str(policy.name)
    finally:
        for layer, its_own in before:
            layer._dtype_policy = its_own


def policy_of(model: Any) -> Any:
    """The policy most layers with weights have. Keras saves those, and not the one of the model around them."""
    policies = [
        layer.dtype_policy
        for layer in model._flatten_layers()
        if layer._trainable_variables or layer._non_trainable_variables
    ]
    return max(policies, key=policies.count) if policies else model.dtype_policy


@contextlib.contextmanager
def trained_in(model: Any, precision: str) -> Iterator[None]:
    """The same for training: float16 needs its loss scaled, or small gradients are lost."""
    optimizer = model.optimizer
    scaled = precision == "mixed_float16" and not isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    with computed_in(model, precision):
        if scaled:
            model.optimizer = keras.optimizers.LossScaleOptimizer(optimizer)
        try:
            yield
        finally:
            if scaled:
                model.optimizer = optimizer


@contextlib.contextmanager
def compiled(model: Any, jit_compile: bool) -> Iterator[None]:
    before = model.jit_compile
    model.jit_compile = jit_compile
    try:
        yield
    finally:
        model.jit_compile = before
