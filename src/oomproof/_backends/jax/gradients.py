"""Exact loss and gradients of a full batch, in pieces, for loops that are not Keras's."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax
import keras
from jax import numpy as jnp
from keras import tree

from oomproof._backends.common.engine import Outcome, PendingWrites
from oomproof._backends.common.model import first_tensor
from oomproof._backends.common.own_loss import check_have_gradients, loss_of, own_loss
from oomproof._backends.jax.engine import JaxEngine, Reads, tracing
from oomproof._backends.pieces import piece_count

# Programs of loss functions that are decorated with jax.jit, so that a loop compiles each of them once.
_programs: weakref.WeakKeyDictionary[Any, dict[Any, Any]] = weakref.WeakKeyDictionary()


def full_batch_gradients(
    loss_fn: Callable[..., Any], variables: Sequence[Any], data: Any, micro_batch_size: int | None, has_aux: bool
) -> tuple[Any, list[Any]]:
    """See `oomproof.gradients`. Inside of a function that is traced it becomes part of it."""
    check_have_gradients(variables)
    data = tree.map_structure(lambda leaf: leaf if leaf is None else keras.ops.convert_to_tensor(leaf), data)
    # Not the jitted function itself: it would keep what it was traced with, and not see the values it is given.
    plain = getattr(loss_fn, "__wrapped__", loss_fn) if hasattr(loss_fn, "lower") else loss_fn
    read = _variables_read(plain, data)
    state = [variable for variable in read if not any(variable is v for v in variables)]

    def compute(values: list[Any], before: list[Any], data: Any) -> Any:
        return _compute(plain, variables, values, state, before, data, micro_batch_size, has_aux)

    run = compute
    if plain is not loss_fn and not tracing():
        known = _programs.setdefault(loss_fn, {})
        key = (micro_batch_size, has_aux, *(id(variable) for variable in [*variables, *state]))
        run = known.setdefault(key, jax.jit(compute))
    result, gradients, written = run([_value(v) for v in variables], [v.value for v in state], data)
    if not tracing():
        # Errors arrive late on JAX: nothing is written before all of it is there.
        jax.block_until_ready((result, gradients, written))
    for variable, value in zip(state, written, strict=True):
        variable.assign(value)
    return result, gradients


def _value(variable: Any) -> Any:
    return variable.value if isinstance(variable, keras.Variable) else variable


def _variables_read(loss_fn: Callable[..., Any], data: Any) -> list[Any]:
    """All variables the loss function touches. Their values are inputs of what is traced, never constants of it."""
    scope = Reads(JaxEngine(None).scope().state_mapping)

    def look(data: Any) -> None:
        with scope:
            loss_of(loss_fn, JaxEngine.take(data, 0, 1))

    jax.eval_shape(look, data)
    return list(scope.seen.values())


def _compute(
    loss_fn: Callable[..., Any],
    variables: Sequence[Any],
    values: list[Any],
    state: list[Any],
    before: list[Any],
    data: Any,
    micro_batch_size: int | None,
    has_aux: bool,
) -> Any:
    batch_size = first_tensor(data).shape[0]
    count = piece_count(batch_size, micro_batch_size)
    engine = _OwnLoop()
    # Counters such as random seeds go on from piece to piece; other state is averaged.
    carried = [jnp.issubdtype(value.dtype, jnp.integer) for value in before]
    packings: list[Callable[[list[Any]], Any]] = []

    def piece(start: Any, size: Any, current: list[Any]) -> Outcome:
        part = engine.take(data, start, size)

        def function(values: list[Any]) -> Any:
            known = {id(variable): value for variable, value in zip(variables, values, strict=True)}
            known |= {id(variable): value for variable, value in zip(state, current, strict=True)}
            with PendingWrites(engine.scope().state_mapping | known) as scope:
                own = own_loss(loss_fn, part, size, has_aux)
            packings[:] = [own.packed]
            return own.total, (own.normaliser, [scope.state_mapping[id(variable)] for variable in state], own.rows)

        (total, (normaliser, after, rows)), gradients = jax.value_and_grad(function, has_aux=True)(values)
        share = size / batch_size
        return Outcome(
            # What is not carried starts from the same value in every piece.
            state=[new if kept else old for kept, new, old in zip(carried, after, current, strict=True)],
            sums=[
                total,
                jnp.asarray(normaliser, total.dtype),
                *(new * share for kept, new in zip(carried, after, strict=True) if not kept),
            ],
            gradients=gradients,
            rows=rows,
        )

    outcome = engine.over_pieces(piece, batch_size, count, before)
    total, normaliser, *means = outcome.sums
    averages = iter(means)
    written = [
        new if kept else next(averages).astype(old.dtype)
        for kept, new, old in zip(carried, outcome.state, before, strict=True)
    ]
    # Nothing counted is nothing learned, and no division by zero.
    divisor = jnp.where(normaliser == 0, 1, normaliser)
    gradients = [(g / divisor.astype(g.dtype)).astype(v.dtype) for g, v in zip(outcome.gradients, values, strict=True)]
    loss = total / divisor
    return (loss, packings[0](outcome.rows)) if has_aux else loss, gradients, written


class _OwnLoop(JaxEngine):
    """The engine without a model: gradients are by whatever variables the user names."""

    def __init__(self) -> None:
        super().__init__(_NoModel)


class _NoModel:
    trainable_weights: Sequence[Any] = ()
