"""Where a model's values are while Keras trains it on JAX.

Keras takes all values out of the model, hands them to the step as lists, and puts them back at the end of an epoch;
an exception in between leaves the model empty. Here the variables are given their values back when a step begins and
keep the newest ones from then on: they are the one place where the truth is, whatever happens.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from typing import Any

from oomproof._backends.common.engine import to_the_end

_live: weakref.WeakKeyDictionary[Any, LiveState] = weakref.WeakKeyDictionary()


class LiveState:
    """The variables of a model, in the order of Keras's state, looked up once: that takes longer than a small step."""

    def __init__(self, model: Any, before: LiveState | None = None) -> None:
        self.trainable = list(model.trainable_variables)
        self.non_trainable = list(model.non_trainable_variables)
        # A model that was never compiled has not even the attribute.
        optimizer = getattr(model, "optimizer", None)
        self.optimizer = [] if optimizer is None else list(optimizer.variables)
        self.metrics = list(model.metrics_variables) if model.compiled else []
        everything = [*self.trainable, *self.non_trainable, *self.optimizer, *self.metrics]
        self.variables = list({id(variable): variable for variable in everything}.values())
        self.handed_out: Any = None
        # By phase, what Keras's function sees of the model: a list of other variables is another trace.
        self.orders: dict[str, Order] = {}
        for phase in ("train", "test", "predict"):
            order = Order(self.lists(phase))
            # The same object where nothing has changed: it is compared in every step.
            self.orders[phase] = before.orders[phase] if before and before.orders[phase] == order else order

    def lists(self, phase: str) -> list[list[Any]]:
        metrics = [] if phase == "predict" else [self.metrics]
        return [self.trainable, self.non_trainable, *([self.optimizer] if phase == "train" else []), *metrics]

    def attach(self, phase: str, state: Any) -> None:
        """Gives the variables the values that Keras took out of them."""
        for variables, values in zip(self.lists(phase), state, strict=True):
            for variable, value in zip(variables, values, strict=True):
                variable._value = value

    def state(self, phase: str) -> tuple[Values, ...]:
        state = tuple(Values([variable._value for variable in variables]) for variables in self.lists(phase))
        self.handed_out = state
        return state


class Values(Sequence[Any]):
    """Values as Keras hands them on from step to step, where it only goes through them.

    Keras notes them as an attribute of the model in every step, and looks at each element of a list that it is given
    so: a millisecond for a few hundred. This is no list.
    """

    __slots__ = ("_values",)

    def __init__(self, values: list[Any]) -> None:
        self._values = values

    def __len__(self) -> int:
        return len(self._values)

    def __getitem__(self, index: Any) -> Any:
        return self._values[index]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._values)


class Order:
    """The variables in some lists and their places, to be compared. It holds them, so that none can be another."""

    def __init__(self, lists: list[list[Any]]) -> None:
        self._held = lists
        self._places = tuple(tuple(map(id, variables)) for variables in lists)
        self._hash = hash(self._places)

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Order) and self._places == other._places)

    def __hash__(self) -> int:
        return self._hash


def assign(updates: Sequence[tuple[Any, Any]]) -> None:
    """Moves pointers, all of them or none, and takes no memory."""

    def move() -> None:
        for variable, value in updates:
            variable._value = value

    to_the_end(move)


def live_state(model: Any, anew: bool = False) -> LiveState:
    if anew or model not in _live:
        _live[model] = LiveState(model, _live.get(model))
    return _live[model]
