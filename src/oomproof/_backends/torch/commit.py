"""The update: it happens as a whole or not at all.

Keras's optimizers on torch write in place, many variables in one call, past any scope. So everything an update may
write is copied first. If anything fails, also Ctrl-C, the copies are put back, which takes no memory.

The copies are on the device, where they cost little time and are gone before the next forward pass needs the
room. The lean commit, for models whose copies do not fit there, has them on the host, and updates one variable
after the other, a few rows at a time where the optimizer allows it (common/rows.py), so that what is computed in
between is small.
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import keras
import torch

from oomproof._backends.common import rows
from oomproof._backends.common.engine import taken_back, to_the_end
from oomproof._backends.common.model import written_by_update
from oomproof._backends.torch.writes import settled, write
from oomproof._compat.torch import cloned, updates_all_at_once

_MARK = "_oomproof_commit"


def failed_in_commit(error: BaseException) -> bool:
    """Whether an error was raised by an update."""
    return getattr(error, _MARK, False)


class Commit:
    """Makes the updates of one model.

    Attributes:
        on_host: Values of the variables before the last lean update, by the variable's id.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self.on_host: dict[int, Any] = {}

    def __call__(
        self, weights: Sequence[Any], gradients: Sequence[Any], pending: Sequence[tuple[Any, Any]], lean: bool
    ) -> None:
        """Applies the gradients and makes the pending writes; if anything fails, nothing has changed.

        Args:
            weights: The model's trainable weights.
            gradients: One for each of them, or none at all.
            pending: (variable, value) pairs to be written besides.
            lean: With copies on the host, and one variable after the other.
        """
        optimizer = self._model.optimizer
        values: list[Any] = []
        journal: list[Any] = []
        try:
            writes = settled(pending)
            if gradients:
                variables = _unique([*weights, *written_by_update(optimizer), *(variable for variable, _ in pending)])
                values = [variable._value for variable in variables]
                with torch.no_grad():
                    journal = self._copied_to_host(variables) if lean else cloned(values)
            # Before the update: a layer may have written to a weight, and what it wrote is what is updated.
            write(writes)
            if gradients:
                with torch.no_grad(), _one_by_one(optimizer) if lean else contextlib.nullcontext():
                    optimizer.apply(gradients, weights)
        except BaseException as error:
            # The frames of the failed update hold what it computed, and with it the memory others may need.
            traceback.clear_frames(error.__traceback__)
            _put_back(values, journal)
            error.__dict__[_MARK] = True
            raise

    def _copied_to_host(self, variables: Sequence[Any]) -> list[Any]:
        """Copies on the host, in memory that is kept for the next update."""
        for variable in variables:
            known = self.on_host.get(id(variable))
            if known is None or known.shape != variable._value.shape or known.dtype != variable._value.dtype:
                self.on_host[id(variable)] = torch.empty_like(variable._value, device="cpu", requires_grad=False)
        copies = [self.on_host[id(variable)] for variable in variables]
        for copy, variable in zip(copies, variables, strict=True):
            copy.copy_(variable._value)
        return copies


@contextlib.contextmanager
def undone(variables: Sequence[Any]) -> Iterator[None]:
    """Whatever is written to the variables meanwhile is taken back."""
    values = [variable._value for variable in variables]
    journal = [value.detach().to("cpu", copy=True) for value in values]
    with taken_back(lambda: _put_back(values, journal)):
        yield


def _put_back(values: Sequence[Any], journal: Sequence[Any]) -> None:
    """Nothing was written before the journal was complete, so without one there is nothing to do."""

    def copy() -> None:
        for value, old in zip(values, journal, strict=False):
            value.copy_(old)

    # Not in a `with` of ours, which an interrupt may keep from being left.
    to_the_end(torch.no_grad()(copy))


def _unique(variables: Sequence[Any]) -> list[Any]:
    return list({id(variable): variable for variable in variables}.values())


@contextlib.contextmanager
def _one_by_one(optimizer: Any) -> Iterator[None]:
    """Lets Keras's update of all variables at once go one by one: the same numbers from less memory."""
    inner = rows.inner_of(optimizer)
    if not updates_all_at_once(type(inner)):
        # Optimizers of other kinds go one by one as it is.
        yield
        return
    update_all, by_rows = inner._backend_update_step, rows.goes_by_rows(inner)
    # Nadam advances a product that all variables share, whenever it is called.
    shared = [v._value for name, v in vars(inner).items() if isinstance(v, keras.Variable) and name != "_iterations"]
    with rows.put_back_at_the_end(inner) as put_back:

        def update_each(gradients: Sequence[Any], variables: Sequence[Any], learning_rate: Any) -> None:
            before = [value.clone() for value in shared]
            for gradient, variable in zip(gradients, variables, strict=True):
                for gradient_rows, some in _in_rows(inner, gradient, variable, by_rows):
                    for value, old in zip(shared, before, strict=True):
                        value.copy_(old)
                    update_all([gradient_rows], [some], learning_rate)
                put_back()

        vars(inner)["_backend_update_step"] = update_each
        yield


def _in_rows(optimizer: Any, gradient: Any, variable: Any, by_rows: bool) -> Iterator[tuple[Any, Any]]:
    """A gradient and its variable, or a few rows of both at a time, with the optimizer made to find their slots."""
    parts = rows.bounds(variable) if by_rows and not gradient.is_sparse else []
    if len(parts) < 2:
        yield gradient, variable
        return
    index = optimizer._get_variable_index(variable)
    slots = rows.slots_of(optimizer, index)
    for start, stop in parts:
        rows.stand_in(optimizer, index, {name: _Rows(slot._value[start:stop]) for name, slot in slots.items()})
        yield gradient[start:stop], _Rows(variable._value[start:stop])


class _Rows(NamedTuple):
    """Rows of a variable, as Keras's updates take one. What is written to them is written to it."""

    value: torch.Tensor
