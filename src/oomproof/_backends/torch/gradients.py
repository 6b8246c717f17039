"""Exact loss and gradients of a full batch, in pieces, for loops that are not Keras's."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import keras
import torch
from keras import ops

from oomproof._backends.common.batch import batch_leaves
from oomproof._backends.common.own_loss import check_have_gradients, own_loss
from oomproof._backends.pieces import piece_bounds, piece_count
from oomproof._backends.torch.engine import size_of, take
from oomproof._backends.torch.untracked import generators
from oomproof._backends.torch.writes import Gradients, PendingWrites, settled, write
from oomproof._compat.keras import get_stateless_scope


def full_batch_gradients(
    loss_fn: Callable[..., Any], variables: Sequence[Any], data: Any, micro_batch_size: int | None, has_aux: bool
) -> tuple[Any, list[Any]]:
    """See `oomproof.gradients`. Gradients that the variables hold already are left as they are."""
    check_have_gradients(variables)
    leaves = [variable._value if isinstance(variable, keras.Variable) else variable for variable in variables]
    size = size_of(batch_leaves(data)[0])
    pieces = piece_count(size, micro_batch_size)
    with torch.no_grad(), _numbers_again_on_failure(), _own_gradients_kept(leaves):
        totals = _Totals(leaves, has_aux)
        for start, stop in piece_bounds(size, pieces):
            totals.add(loss_fn, take(data, start, stop - start), stop - start, (stop - start) / size)
        loss = ops.divide_no_nan(totals.loss, totals.normaliser)
        gradients = [_divided(gradient, totals.normaliser) for gradient in totals.gradients.taken()]
        result = (loss, totals.aux()) if has_aux else loss
        writes = settled(totals.writes())
    if get_stateless_scope() is None:
        write(writes)
    else:
        for variable, value in writes:
            variable.assign(value)
    return result, gradients


class _Totals:
    """What the pieces so far add up to."""

    def __init__(self, leaves: Sequence[Any], has_aux: bool) -> None:
        self.gradients = Gradients(leaves)
        self._has_aux = has_aux
        # Of each piece, the tensors of its auxiliary outputs.
        self._rows: list[list[Any]] = []
        self._packed: Callable[[list[Any]], Any]
        self.loss: Any = None
        self.normaliser: Any = None
        outer = get_stateless_scope()
        self._outer = {} if outer is None else dict(outer.state_mapping)
        self._variables: dict[int, Any] = {}
        # Integers, such as random seeds: each piece goes on from the one before. Everything else is averaged.
        self._counters: dict[int, Any] = {}
        self._means: dict[int, Any] = {}

    def add(self, loss_fn: Callable[..., Any], data: Any, samples: int, share: float) -> None:
        scope = PendingWrites(self._outer | self._counters)

        def compute() -> tuple[Any, tuple[Any, Any]]:
            own = own_loss(loss_fn, data, samples, self._has_aux)
            self._rows.append(own.rows)
            self._packed = own.packed
            total = own.total
            if not total.requires_grad:
                # No variable is used. A derivative of zero by nothing, rather than torch's error about it.
                return total.detach().requires_grad_(), (total.detach(), own.normaliser)
            return total, (total.detach(), own.normaliser)

        with scope:
            total, normaliser = self.gradients.add(compute)
        normaliser = ops.cast(ops.stop_gradient(ops.convert_to_tensor(normaliser)), ops.dtype(total))
        self.loss = total if self.loss is None else self.loss + total
        self.normaliser = normaliser if self.normaliser is None else self.normaliser + normaliser
        for variable, value in scope.pending():
            key = id(variable)
            self._variables[key] = variable
            if value.is_floating_point():
                part = value * share
                self._means[key] = self._means[key] + part if key in self._means else part
            else:
                self._counters[key] = value

    def aux(self) -> Any:
        return self._packed([torch.cat(parts) for parts in zip(*self._rows, strict=True)])

    def writes(self) -> list[tuple[Any, Any]]:
        return [(self._variables[key], value) for key, value in [*self._means.items(), *self._counters.items()]]


def _divided(gradient: Any, normaliser: Any) -> Any:
    return None if gradient is None else ops.divide_no_nan(gradient, normaliser.to(gradient.dtype))


@contextmanager
def _own_gradients_kept(leaves: Sequence[Any]) -> Iterator[None]:
    own = [leaf.grad for leaf in leaves]
    try:
        yield
    finally:
        for leaf, gradient in zip(leaves, own, strict=True):
            leaf.grad = gradient


@contextmanager
def _numbers_again_on_failure() -> Iterator[None]:
    states = [(generator, generator.get_state()) for generator in generators()]
    try:
        yield
    except BaseException:
        for generator, state in states:
            generator.set_state(state)
        raise
