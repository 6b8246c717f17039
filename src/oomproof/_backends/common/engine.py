"""What the neutral phases need from a framework: differentiation, a loop over pieces, writes that wait."""

from __future__ import annotations

import contextlib
import dataclasses
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, Self

import keras

from oomproof._backends.common.draws import DrawTable, Rows
from oomproof._compat.keras import get_stateless_scope


class PendingWrites(keras.StatelessScope):  # type: ignore[misc]
    """A scope in which Keras variables can be written, and nothing reaches the real ones.

    Args:
        values: Value of a variable inside the scope, by its id.
    """

    def __init__(self, values: dict[int, Any]) -> None:
        super().__init__(collect_losses=True, initialize_variables=False)
        self.state_mapping.update(values)
        self.written: dict[int, Any] = {}

    @classmethod
    def within(cls, state: Sequence[tuple[Any, Any]]) -> Self:
        """A scope inside of the current one, in which the given variables have the given values."""
        outer = get_stateless_scope()
        values = {} if outer is None else dict(outer.state_mapping)
        return cls(values | {id(variable): value for variable, value in state})

    def add_update(self, update: tuple[Any, Any]) -> None:
        variable, value = update
        self.written[id(variable)] = variable
        self.state_mapping[id(variable)] = value

    def pending(self) -> list[tuple[Any, Any]]:
        """(variable, new value) of every write."""
        return [(variable, self.state_mapping[key]) for key, variable in self.written.items()]


def to_the_end(write: Callable[[], None]) -> None:
    """Writes all or, where Ctrl-C comes in between, all of it again: nothing stays half written."""
    try:
        write()
    except BaseException:
        write()
        raise


@contextlib.contextmanager
def taken_back(put_back: Callable[[], None]) -> Iterator[None]:
    """Puts back what is changed inside, whatever happens there or, by Ctrl-C, meanwhile."""
    try:
        try:
            yield
        except BaseException as error:
            # The frames of what failed hold what it computed, and with it the memory that putting back may need.
            traceback.clear_frames(error.__traceback__)
            raise
        finally:
            put_back()
    except BaseException:
        put_back()
        raise


@dataclasses.dataclass
class Outcome:
    """What a piece hands on. Lists keep their order over all pieces.

    Attributes:
        state: Values each piece takes over from the one before (metrics), or which are the same after each (seeds).
        sums: Tensors that add up over pieces.
        gradients: One for each trainable weight, or none at all. Dense ones add up, in float32 at least; the rows of
            sparse ones are put one behind the other, never merged; a `None` stays `None`. What overwrites its weight
            is not summed: the largest counts.
        rows: Tensors with a row for each sample, put one behind the other.
    """

    state: list[Any]
    sums: list[Any] = dataclasses.field(default_factory=list)
    gradients: list[Any] = dataclasses.field(default_factory=list)
    rows: list[Any] = dataclasses.field(default_factory=list)


Piece = Callable[[Any, Any, list[Any]], Outcome]
# Returns what is to be differentiated, and whatever else is to be handed on.
Compute = Callable[..., tuple[Any, list[Any]]]


class Engine(Protocol):
    """One framework's way to compute with one model. Everything runs inside of a scope and writes nothing.

    Attributes:
        gone: Errors that say that a tensor is used outside of the loop, or the function, it was made in.
    """

    gone: tuple[type[Exception], ...]

    # Where the head of the model begins, and into how many parts it is cut, if it is.
    head: tuple[str, int] | None
    # How many rows the model's draws have for each sample.
    draws: DrawTable
    # Whether pieces draw the numbers of the whole batch to take their rows. For small batches.
    draws_whole: bool

    @property
    def multiplies_coarsely(self) -> bool:
        """Whether float32 is multiplied with fewer bits where few samples are looked at, as GPUs do."""

    @property
    def wide(self) -> str:
        """The widest floating point type there is, for averages of counters."""

    def scope(self, state: Sequence[tuple[Any, Any]] = ()) -> PendingWrites:
        """A scope inside of the current one, in which the given variables have the given values."""

    def changed(self, variables: Sequence[Any], change: Callable[[Any], Any]) -> AbstractContextManager[None]:
        """While it lasts, variables are as `change` makes them, from arrays. Then as they were, whatever happened."""

    def drawing(self, rows: Rows, whole: bool | None = None) -> AbstractContextManager[None]:
        """While it lasts, the model draws what the whole batch would have drawn for these samples, where it can."""

    def recorded_draws(self) -> AbstractContextManager[list[Any]]:
        """Collects everything that is drawn in this thread, in order."""

    def other_numbers(self) -> tuple[str, ...]:
        """Layers whose pieces draw other numbers than the whole batch."""

    def call(self, x: Any, training: bool) -> Any:
        """Calls the model as Keras's own step does on this backend. The losses that layers add are in the scope."""

    def losses_of_call(self) -> AbstractContextManager[None]:
        """Around Keras's loss: the losses that layers have added are those it finds, as in Keras's own step."""

    def run(self, compute: Compute, inputs: Sequence[Any] = ()) -> list[Any]:
        """What `compute(*inputs)` hands on, without any derivative."""

    def differentiate(self, compute: Compute, inputs: Sequence[Any] = ()) -> tuple[list[Any], list[Any], list[Any]]:
        """The same, with the target's gradients by the model's trainable weights and by the inputs."""

    def over_pieces(self, piece: Piece, batch_size: Any, count: Any, state: list[Any]) -> Outcome:
        """Runs `piece(start, size, state)` for each of `count` pieces in turn, holding one at a time."""

    def until_head(self, x: Any) -> Any:
        """Calls the model as far as its head, while training; see `recompute.Rest`."""

    def over_parts(self, part: Piece, size: Any, count: Any, state: list[Any]) -> Outcome:
        """As `over_pieces`, inside of what is differentiated, which sees nothing of it.

        Gradients are in the place of their weights, `None` for those that no part uses. An engine whose gradients add
        up in place hands on none.
        """

    def take(self, data: Any, start: Any, size: Any) -> Any:
        """Samples `start` to `start + size` of every tensor of the batch, cut where the batch is."""

    def pick(self, data: Any, samples: Sequence[int]) -> Any:
        """These samples of a batch on which nothing is traced, in this order."""

    def take_rows(self, tensors: list[Any], start: Any, size: Any) -> list[Any]:
        """The same of tensors that were computed."""

    def size_of(self, leaf: Any) -> Any:
        """Samples in a tensor."""

    def insist(self, number: Any, wanted: Any, otherwise: str) -> None:
        """Raises UnsupportedModelError unless two numbers are the same; when it runs, where they are not known yet."""

    def samples_for_keras(self, x: Any) -> Any:
        """The number of samples as Keras's own step on this backend takes it, to weight the loss it shows."""

    def metrics_see_masks(self, training: bool) -> bool:
        """Whether Keras's own step on this backend hands metrics the mask of the predictions."""

    def opened(self, rows: list[Any]) -> list[Any]:
        """The same tensors, with their number of samples unknown while tracing."""

    def sized(self, rows: list[Any], whole: Callable[[], list[Any]]) -> list[Any]:
        """The same tensors, with what is known of their sizes while tracing when `whole` makes them at once."""

    def add(self, a: Any, b: Any) -> Any:
        """Sum of two gradients of one weight, as backpropagation itself would add them."""
