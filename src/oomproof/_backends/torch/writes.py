"""Writes that wait, and gradients that pieces add to in place."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch

from oomproof._backends.common.engine import PendingWrites as Pending
from oomproof._compat.keras import initialize_all_variables
from oomproof._compat.torch import copy_all

_HALF = (torch.float16, torch.bfloat16)


class PendingWrites(Pending):
    """A scope in which Keras variables can be written, and nothing reaches the real ones.

    What is written is let go of by autograd, as in a real assignment; else it would keep the graph of its piece.
    """

    def add_update(self, update: tuple[Any, Any]) -> None:
        variable, value = update
        parameter, value = variable._value, value.detach()
        if parameter is not None and parameter.requires_grad and torch.is_grad_enabled():
            # Gradients end at an assignment and start anew at the variable, here as in a real one.
            value = _Assigned.apply(parameter, value)
        super().add_update((variable, value))

    def get_current_value(self, variable: Any) -> Any:
        # Weights too have a value here, though they are not written: Keras asks for those with a regulariser.
        return self.state_mapping.get(id(variable), variable._value)

    def pending(self) -> list[tuple[Any, Any]]:
        return [(variable, value.detach()) for variable, value in super().pending()]


def settled(pending: Sequence[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    """Pending (variable, new value) pairs, made such that writing them takes no memory and does not change them."""
    if any(variable._value is None for variable, _ in pending):
        # Made inside of the scope, as Keras's global seed generator is when it is first needed.
        initialize_all_variables()
    changing = {variable._value.untyped_storage().data_ptr() for variable, _ in pending}

    def settle(variable: Any, value: Any) -> Any:
        value = value.to(device=variable._value.device, dtype=variable._value.dtype)
        # Keras hands a variable through as it is: what counts is its value when it was assigned.
        return value.clone() if value.untyped_storage().data_ptr() in changing else value

    return [(variable, settle(variable, value)) for variable, value in pending]


def write(settled_writes: Sequence[tuple[Any, Any]]) -> None:
    """Makes settled writes, all of them in one call that an interrupt cannot come into."""
    if settled_writes:
        with torch.no_grad():
            copy_all([v._value for v, _ in settled_writes], [value for _, value in settled_writes])


class _Assigned(torch.autograd.Function):  # type: ignore[misc]
    """A value that has been assigned to a parameter: reading it is reading the parameter."""

    @staticmethod
    def forward(ctx: Any, parameter: Any, value: Any) -> Any:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0], None


class Gradients:
    """The gradients by some leaf tensors. There is one set of them, which every call adds to in place.

    Autograd adds to `.grad` layer by layer, while it goes back, so that not even the gradients of one piece are
    there twice. Half precision would lose the small pieces of a sum, so there the sum is kept in float32.

    Args:
        leaves: The leaf tensors.
        largest: Positions of those whose gradients are not added up: the largest values count.
    """

    def __init__(self, leaves: Sequence[Any], largest: Collection[int] = ()) -> None:
        self._leaves = leaves
        self._largest = largest
        self._added = False
        # Whether what runs now has parts that were differentiated by themselves.
        self._by_parts = False
        # What parts have left in half precision.
        self._parts: dict[int, Any] = {}
        self._sums: list[Any] = [None] * len(leaves)

    def add(self, compute: Callable[[], Any]) -> Any:
        """Runs `compute`, which returns (what is to be differentiated, anything). Returns that thing.

        What was there before the forward pass is the sum so far, or nothing: old gradients take no room meanwhile.
        """
        self._added, self._by_parts, self._parts = True, False, {}
        sums, self._sums = self._sums, [None] * len(self._leaves)
        try:
            for index, (leaf, gradient) in enumerate(zip(self._leaves, sums, strict=True)):
                leaf.grad = None if self._is_apart(index) else gradient
            with torch.enable_grad():
                target, result = compute()
                if target.requires_grad or not self._by_parts:
                    target.backward()
            parts, self._parts = self._parts, {}
            self._sums = [
                self._together(index, self._together(index, before, parts.get(index)), leaf.grad)
                if self._is_apart(index)
                else leaf.grad
                for index, (leaf, before) in enumerate(zip(self._leaves, sums, strict=True))
            ]
        finally:
            for leaf in self._leaves:
                leaf.grad = None
        return result

    def add_part(self, compute: Callable[..., Any], inputs: Sequence[Any]) -> tuple[Any, list[Any]]:
        """Differentiates a part of what `add` runs, at once.

        Args:
            compute: As for `add`, a function of the inputs.
            inputs: Tensors that the rest has made.

        Returns:
            That thing, and the gradients by the inputs.
        """
        self._by_parts = True
        leaves = [value.detach().requires_grad_(value.is_floating_point()) for value in inputs]
        with torch.enable_grad():
            target, result = compute(*leaves)
            target.backward()
        for index, leaf in enumerate(self._leaves):
            if self._is_apart(index) and leaf.grad is not None:
                self._parts[index] = self._together(index, self._parts.get(index), leaf.grad)
                leaf.grad = None
        return result, [leaf.grad for leaf in leaves]

    def _is_apart(self, index: int) -> bool:
        """Whether autograd must not add to what was there before."""
        return index in self._largest or self._leaves[index].dtype in _HALF

    def _together(self, index: int, before: Any, gradient: Any) -> Any:
        """What was there before with what autograd has left apart from it."""
        if before is None or gradient is None:
            return gradient if before is None else before
        if index in self._largest:
            return torch.maximum(before, gradient)
        return before.add_(gradient) if before.dtype == torch.float32 else before.float().add_(gradient)

    def taken(self) -> list[Any]:
        """The gradients, each in the precision of its leaf, or none if nothing was added. They are let go of here."""
        if not self._added:
            return []
        sums, self._sums = self._sums, [None] * len(self._leaves)
        return [g if g is None else g.to(leaf.dtype) for g, leaf in zip(sums, self._leaves, strict=True)]
