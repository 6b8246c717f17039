"""A batch that is computed in pieces, and what its pieces write."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import keras
from keras import ops

from oomproof._backends.common import statistics
from oomproof._backends.common.computing import Computing, weighted
from oomproof._backends.common.draws import Rows
from oomproof._backends.common.engine import Engine, Outcome, PendingWrites, Piece
from oomproof._backends.common.model import (
    first_tensor,
    seed_variables,
    statistics_layers,
    tracker_variables,
    unpack,
)
from oomproof._backends.common.predictions import Predictions


class SplitBatch:
    """A batch that is computed in pieces.

    Args:
        computing: What is computed.
        data: The batch.
        count: Into how many pieces it is cut.
        training: Whether the model trains on it.
    """

    def __init__(self, computing: Computing, data: Any, count: Any, training: bool) -> None:
        self.computing = computing
        self.model, self.engine = computing.model, computing.engine
        self.data = data
        self.x, self.y, self.sample_weight = unpack(data)
        self.size = self.engine.size_of(first_tensor(self.x))
        self.count = count
        self.training = training
        self.predictions = Predictions()
        self.writes = PieceWrites(self.model, self.engine, training)

    def take(self, start: Any, size: Any) -> tuple[Any, Any, Any]:
        """Inputs, targets and sample weights of a piece."""
        return unpack(self.engine.take(self.data, start, size))

    def over_pieces(self, piece: Piece) -> Outcome:
        return self.engine.over_pieces(piece, self.size, self.count, self.writes.before)

    @contextlib.contextmanager
    def piece(self, start: Any, size: Any, state: list[Any]) -> Iterator[PendingWrites]:
        """The scope that a piece is computed in."""
        rows = Rows(start, size, self.size)
        with self.engine.drawing(rows), self.engine.scope(self.writes.for_piece(state)) as scope:
            yield scope


class PieceWrites:
    """What pieces write, put together as the whole batch would have written it.

    Seeds, and metrics but for loss trackers, come out of each piece. Each piece takes the metrics over from the one
    before it. The seeds are those that the batch began with: from them each draws its rows of the whole batch's
    numbers, and the same ones when it is computed a second time. After any piece they are as after the whole batch.

    Moving statistics follow from sums over pieces. Other state that layers write is averaged over pieces, which is
    exact for running means of the batch.

    Attributes:
        before: Values that the first piece starts from.
        seeds: How many of them are seeds, which come first.
    """

    def __init__(self, model: Any, engine: Engine, training: bool) -> None:
        seeds, trackers = seed_variables(model), tracker_variables(model)
        not_carried = {id(variable) for variable in trackers}
        self._carried = [*seeds, *(v for v in model.metrics_variables if id(v) not in not_carried)]
        self.seeds = len(seeds)
        self.before = [ops.convert_to_tensor(variable.value) for variable in self._carried]
        self._engine = engine
        self._layers = statistics_layers(model) if training else []
        moving = [variable for layer in self._layers for variable in layer.non_trainable_variables]
        self._not_averaged = {id(variable) for variable in (*self._carried, *trackers, *moving)}
        # What is learnt while a piece is traced, and needed to read the outcome of the loop.
        self._calls: list[Any] = []
        self._averaged: list[tuple[Any, Any]] = []

    def for_piece(self, state: list[Any]) -> list[tuple[Any, Any]]:
        """The value that each variable has when a piece begins, given what came out of the piece before."""
        values = [*self.before[: self.seeds], *state[self.seeds :]]
        return list(zip(self._carried, values, strict=True))

    def state_in(self, scope: PendingWrites) -> list[Any]:
        """What comes out of the piece of the scope."""
        return [scope.get_current_value(variable) for variable in self._carried]

    @contextlib.contextmanager
    def recorded(self) -> Iterator[list[Any]]:
        """Around a call of the model. The list has the sums that moving statistics follow from when it is over."""
        sums: list[Any] = []
        with statistics.recorded(self._layers) as moments:
            yield sums
        self._calls = [layer for layer, _ in moments]
        sums += [value for _, values in moments for value in values]

    def averages_in(self, scope: PendingWrites, share: Any) -> list[Any]:
        """The piece's share of the averages of other state, to be added up behind the sums that were recorded."""
        self._averaged = [pair for pair in scope.pending() if id(pair[0]) not in self._not_averaged]
        return [weighted(self._engine, value, share) for _, value in self._averaged]

    def write_back(self, state: list[Any], sums: Iterator[Any]) -> None:
        """Writes what the last piece left, and what follows from the sums over all of them."""
        for variable, value in zip(self._carried, state, strict=True):
            variable.assign(value)
        statistics.advance(self._calls, [next(sums) for _ in range(3 * len(self._calls))])
        for variable, value in self._averaged:
            mean = next(sums)
            # Averages of whole numbers are taken in floating point; counters come back as they went in.
            whole_numbers = not keras.backend.is_float_dtype(value.dtype)
            variable.assign(ops.cast(ops.round(mean) if whole_numbers else mean, value.dtype))
