"""What one logical batch computes, in Keras's own terms: loss, gradients, metrics, and pending writes.

Nothing here writes to a variable. A batch is computed whole, exactly as Keras's own train_step does, or in pieces:

streaming   Each piece computes its exact share of the batch's loss and its gradient. For Keras's own losses.
gathering   All predictions are computed piece by piece, the loss once on all of them, and then the gradient piece
            by piece from the loss's derivative with respect to the predictions. One more forward pass, and exact
            for any loss that depends on predictions and targets: Dice, contrastive losses, own `compute_loss`.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import keras
from keras import ops, tree
from keras.src import backend as keras_backend
from keras.src.backend.common.stateless_scope import get_stateless_scope

from oomproof._backends.common import losses, statistics
from oomproof._backends.common.draws import Rows
from oomproof._backends.common.engine import Compute, Engine, Outcome, PendingWrites
from oomproof._backends.common.model import (
    first_tensor,
    fixed_regularisers,
    losses_stream,
    may_mask,
    metrics_stream,
    mixes_samples,
    overwritten,
    seed_variables,
    statistics_layers,
    tracker_variables,
    unpack,
    uses_kept_tensor,
)
from oomproof._backends.common.predictions import Predictions, check_rows, check_same_rows, rows_of_piece
from oomproof.errors import UnsupportedModelError


class Phases:
    """The computations of one built and compiled model.

    Args:
        model: The model.
        engine: How the framework computes.
        added_losses: How each loss from `add_loss` and activity regularisers behaves under splitting, `"mean"` or
            `"sum"`, in the order the layers add them: while training and otherwise.
        open_size: Whether Keras would have traced with the batch size left open though it is known here. Keras
            weights the losses of several outputs by the batch size where it knows it.
        nothing_to_count: Filled with the phases, training or not, in which no normaliser of a loss depended on more
            than the number of samples: another time they need not be counted first.
    """

    def __init__(
        self,
        model: Any,
        engine: Engine,
        added_losses: Mapping[bool, Sequence[str]],
        open_size: bool = False,
        nothing_to_count: set[bool] | None = None,
    ) -> None:
        self.model = model
        self.engine = engine
        self.added_losses = added_losses
        self.open_size = open_size
        # Whether gradients are wanted of what trains.
        self.differentiates = True
        self._nothing_to_count = set[bool]() if nothing_to_count is None else nothing_to_count

    # Whole batches

    def whole(self, data: Any, training: bool) -> tuple[list[Any], Any]:
        """Gradients and logs of a batch computed in one go. Runs inside a scope."""
        model = self.model
        x, y, sample_weight = unpack(data)
        predictions = Predictions()

        def compute() -> tuple[Any, list[Any]]:
            y_pred = self.engine.call(x, training)
            with self.engine.losses_of_call():
                loss = model._compute_loss(x=x, y=y, y_pred=y_pred, sample_weight=sample_weight, training=training)
            model._loss_tracker.update_state(loss, sample_weight=self.engine.samples_for_keras(x))
            return self._scaled(loss), predictions.flat(y_pred)

        rows, gradients, _ = self._run(compute, training)
        return gradients, model.compute_metrics(
            x, y, self._for_metrics(predictions, rows, training), sample_weight=sample_weight
        )

    def _run(
        self, compute: Compute, training: bool, inputs: Sequence[Any] = ()
    ) -> tuple[list[Any], list[Any], list[Any]]:
        if not training or not self.differentiates:
            return self.engine.run(compute, inputs), [], []
        if not self.model.trainable_weights:
            warnings.warn("The model does not have any trainable weights.", stacklevel=2)
            return self.engine.run(compute, inputs), [], []
        return self.engine.differentiate(compute, inputs)

    def _for_metrics(self, predictions: Predictions, rows: list[Any], training: bool) -> Any:
        return predictions.restored(rows, masks=self.engine.metrics_see_masks(training))

    def _scaled(self, loss: Any) -> Any:
        return loss if self.model.optimizer is None else self.model.optimizer.scale_loss(loss)

    # Batches in pieces

    def split(self, data: Any, count: Any, training: bool) -> tuple[list[Any], Any]:
        """Gradients and logs of a batch computed in `count` pieces. Runs inside a scope."""
        if losses_stream(self.model):
            with contextlib.suppress(_MixingOutputsError):
                counted = may_mask(self.model, data) and training not in self._nothing_to_count
                try:
                    return self._stream(data, count, training, counted)
                except losses.UncountedNormaliserError:
                    return self._stream(data, count, training, counted=True)
        return self._gather(data, count, training)

    def _stream(self, data: Any, count: Any, training: bool, counted: bool) -> tuple[list[Any], Any]:
        model, engine = self.model, self.engine
        x, y, sample_weight = unpack(data)
        batch_size = engine.size_of(first_tensor(x))
        by_pieces = metrics_stream(model)
        carried = self._carried()
        totals = self._normalisers(data, count, batch_size, training) if counted else []
        if counted:
            # A mask that pooling has used up reaches no loss. Where it does after all, that is found out.
            (self._nothing_to_count.discard if totals else self._nothing_to_count.add)(training)
        predictions, written = Predictions(), Written()

        def piece(start: Any, size: Any, state: list[Any]) -> Outcome:
            x, y, sample_weight = unpack(engine.take(data, start, size))
            share = _share(size, batch_size)
            layers = statistics_layers(model) if training else []

            def compute() -> tuple[Any, list[Any]]:
                with statistics.recorded(layers) as moments:
                    y_pred = engine.call(x, training)
                if mixes_samples(model, y_pred, size):
                    raise _MixingOutputsError
                reductions = losses.Reductions(totals, share)
                # Around the compiled loss alone: a loss inside of the model is none of its shares.
                with losses.replaced_by(reductions):
                    compiled = model._compile_loss(y, y_pred, sample_weight)
                added = self._added(share, training)
                written.calls = [layer for layer, _ in moments]
                rows = predictions.flat(y_pred)
                sums = [compiled, *added, *reductions.values, *(sum_ for _, sums in moments for sum_ in sums)]
                return self._scaled(_total([compiled, *added], compiled.dtype)), [*rows, *sums]

            with self._piece(Rows(start, size, batch_size), carried, state) as scope:
                results, gradients, _ = self._run(compute, training)
                rows, sums = results[: predictions.count], results[predictions.count :]
                if by_pieces and model._compile_metrics is not None:
                    y_pred = self._for_metrics(predictions, rows, training)
                    model._compile_metrics.update_state(y, y_pred, sample_weight)
            written.averaged = self._averaged(scope, carried, layers)
            return Outcome(
                state=carried.values_in(scope),
                sums=[*sums, *(self._weighted(value, share) for _, value in written.averaged)],
                gradients=gradients,
                rows=[] if by_pieces else rows,
            )

        outcome = engine.over_pieces(piece, batch_size, count, carried.before)
        sums = iter(outcome.sums)
        compiled = next(sums)
        added = [next(sums) for _ in self.added_losses[training]]
        terms = [next(sums) for _ in model._compile_loss._flat_losses]
        self._write_back(carried, outcome.state, written, sums)
        gradients, penalty = self._with_regularisers(outcome.gradients, training)
        if len(terms) > 1 and (tree.is_nested(y) or predictions.nested):
            for metric, term in zip(model._compile_loss.metrics, terms, strict=True):
                # Weighted as Keras does it: by the batch size where that is known while tracing.
                metric.update_state(term, sample_weight=None if self.open_size else first_tensor(x).shape[0])
        loss = _total([compiled, *added, penalty], compiled.dtype)
        model._loss_tracker.update_state(loss, sample_weight=engine.samples_for_keras(x))
        if by_pieces:
            return gradients, model.get_metrics_result()
        y_pred = self._for_metrics(predictions, outcome.rows, training)
        return gradients, model.compute_metrics(x, y, y_pred, sample_weight=sample_weight)

    def _normalisers(self, data: Any, count: Any, batch_size: Any, training: bool) -> list[Any]:
        """Normalisers of the whole batch, for losses whose normaliser depends on masks or weights.

        In a graph nothing but what the normalisers depend on is run: for a mask of the inputs, next to nothing.
        """
        carried = self._carried()

        def piece(start: Any, size: Any, state: list[Any]) -> Outcome:
            x, y, sample_weight = unpack(self.engine.take(data, start, size))
            reductions = losses.Reductions(None, _share(size, batch_size))

            def compute() -> tuple[Any, list[Any]]:
                y_pred = self.engine.call(x, training)
                with losses.replaced_by(reductions):
                    self.model._compile_loss(y, y_pred, sample_weight)
                return None, reductions.normalisers

            with self._piece(Rows(start, size, batch_size), carried, state) as scope:
                sums = self.engine.run(compute)
            return Outcome(state=carried.values_in(scope), sums=sums)

        return self.engine.over_pieces(piece, batch_size, count, carried.before).sums

    def _gather(self, data: Any, count: Any, training: bool) -> tuple[list[Any], Any]:
        model, engine = self.model, self.engine
        x, y, sample_weight = unpack(data)
        batch_size = engine.size_of(first_tensor(x))
        carried = self._carried()
        predictions, written = Predictions(), Written()

        def forward(start: Any, size: Any, state: list[Any]) -> Outcome:
            inputs, _, _ = unpack(engine.take(data, start, size))
            share = _share(size, batch_size)
            layers = statistics_layers(model) if training else []

            def compute() -> tuple[Any, list[Any]]:
                with statistics.recorded(layers) as moments:
                    y_pred = engine.call(inputs, training)
                written.calls = [layer for layer, _ in moments]
                rows = predictions.flat(y_pred)
                check_rows(rows, size)
                sums = [*self._added(share, training), *(sum_ for _, sums in moments for sum_ in sums)]
                return None, [*rows, *sums]

            with self._piece(Rows(start, size, batch_size), carried, state) as scope:
                results = engine.run(compute)
            written.averaged = self._averaged(scope, carried, layers)
            return Outcome(
                state=carried.values_in(scope),
                sums=[
                    *results[predictions.count :],
                    *(self._weighted(value, share) for _, value in written.averaged),
                ],
                rows=results[: predictions.count],
            )

        outcome = engine.over_pieces(forward, batch_size, count, carried.before)
        sums = iter(outcome.sums)
        added = [next(sums) for _ in self.added_losses[training]]
        check_rows(outcome.rows, batch_size)
        rows = engine.opened(outcome.rows) if self.open_size else self._sized(outcome.rows, x, training)
        self._write_back(carried, outcome.state, written, sums)
        model._clear_losses()

        def combine(*inputs: Any) -> tuple[Any, list[Any]]:
            scope = get_stateless_scope()
            for value in inputs[predictions.count :]:
                # Keras finds the losses of a call by the identity of their tensors.
                scope.losses.append(value)
                model._loss_ids.add(id(value))
            y_pred = predictions.restored(list(inputs[: predictions.count]))
            with self._outside_of_pieces(), engine.losses_of_call():
                loss = model._compute_loss(x=x, y=y, y_pred=y_pred, sample_weight=sample_weight, training=training)
            model._loss_tracker.update_state(loss, sample_weight=engine.samples_for_keras(x))
            return self._scaled(loss), []

        _, direct, upstream = self._run(combine, training, [*rows, *added])
        y_pred = self._for_metrics(predictions, rows, training)
        logs = model.compute_metrics(x, y, y_pred, sample_weight=sample_weight)
        if not direct or all(slope is None for slope in upstream):
            # Nothing to differentiate, or a loss that uses no predictions, such as one that calls the model itself.
            return direct, logs
        per_sample, per_loss = upstream[: predictions.count], upstream[predictions.count :]

        def backward(start: Any, size: Any, state: list[Any]) -> Outcome:
            inputs, _, _ = unpack(engine.take(data, start, size))
            slopes = rows_of_piece(engine, per_sample, batch_size, start, size)

            def compute() -> tuple[Any, list[Any]]:
                leaves = predictions.flat(engine.call(inputs, True))
                check_same_rows(engine, leaves, slopes)
                targets = [*leaves, *self._added(_share(size, batch_size), True)]
                # Its derivative by each target is that target's slope.
                return _dot(targets, [*slopes, *per_loss]), []

            with self._piece(Rows(start, size, batch_size), carried, state) as scope:
                _, gradients, _ = engine.differentiate(compute)
            return Outcome(state=carried.values_in(scope), gradients=gradients)

        outcome = engine.over_pieces(backward, batch_size, count, carried.before)
        return self._together(outcome.gradients, direct), logs

    def _sized(self, rows: list[Any], x: Any, training: bool) -> list[Any]:
        """The same tensors, with as many rows known while tracing as Keras would know: it weights losses by that."""
        shown = self.model._compile_loss
        if shown is None or len(shown._flat_losses or ()) < 2 or not isinstance(first_tensor(x).shape[0], int):
            return rows
        return self.engine.sized(rows, lambda: Predictions().flat(self.engine.call(x, training)))

    # What pieces share

    @contextlib.contextmanager
    def _outside_of_pieces(self) -> Iterator[None]:
        """Around what is computed on the predictions of the whole batch, where tensors of a piece are gone."""
        try:
            yield
        except self.engine.gone as error:
            raise uses_kept_tensor(self.model) from error

    def _carried(self) -> Carried:
        trackers = {id(v) for v in tracker_variables(self.model)}
        metrics = [v for v in self.model.metrics_variables if id(v) not in trackers]
        return Carried(seed_variables(self.model), metrics)

    @contextlib.contextmanager
    def _piece(self, rows: Rows, carried: Carried, state: list[Any]) -> Iterator[PendingWrites]:
        with self.engine.drawing(rows), self.engine.scope(carried.for_piece(state)) as scope:
            yield scope

    def _added(self, share: Any, training: bool) -> list[Any]:
        """The piece's share of every loss that layers added."""
        kinds, added = self.added_losses[training], get_stateless_scope().losses
        if len(added) != len(kinds):
            raise UnsupportedModelError(
                f"The model's layers added {len(added)} losses to this batch and {len(kinds)} when they were "
                "examined. A batch whose number of losses changes cannot be cut: add a loss of zero instead of none."
            )
        values = [ops.sum(_floating(value)) for value in added]
        return [
            self._weighted(value, share) if kind != "sum" else value for value, kind in zip(values, kinds, strict=True)
        ]

    def _weighted(self, value: Any, share: Any) -> Any:
        if not keras.backend.is_float_dtype(value.dtype):
            value = ops.cast(value, self.engine.wide)
        return losses.times(value, share)

    def _averaged(self, scope: PendingWrites, carried: Carried, recorded: list[Any]) -> list[tuple[Any, Any]]:
        """Other state that layers wrote, to be averaged over pieces: exact for running means of the batch."""
        handled = {id(v) for v in [*carried.variables, *tracker_variables(self.model)]}
        for layer in recorded:
            handled |= {id(statistic) for statistic in layer.non_trainable_variables}
        return [(variable, value) for variable, value in scope.pending() if id(variable) not in handled]

    def _write_back(self, carried: Carried, state: list[Any], written: Written, sums: Any) -> None:
        for variable, value in zip(carried.variables, state, strict=True):
            variable.assign(value)
        statistics.advance(written.calls, [next(sums) for _ in range(3 * len(written.calls))])
        for variable, value in written.averaged:
            mean = next(sums)
            # Averages of whole numbers are taken in floating point; counters come back as they went in.
            whole_numbers = not keras.backend.is_float_dtype(value.dtype)
            variable.assign(ops.cast(ops.round(mean) if whole_numbers else mean, value.dtype))

    def _with_regularisers(self, gradients: list[Any], training: bool) -> tuple[list[Any], Any]:
        """Adds the weight penalties, which count once a batch."""
        variables = fixed_regularisers(self.model)
        if not variables:
            return gradients, None

        def compute() -> tuple[Any, list[Any]]:
            penalties = [_floating(ops.sum(v.regularizer(v.value))) for v in variables]
            penalty = _total(penalties, penalties[0].dtype)
            return self._scaled(penalty), [penalty]

        (penalty,), extra, _ = self._run(compute, training)
        return self._together(gradients, extra), penalty

    def _together(self, gradients: list[Any], extra: list[Any]) -> list[Any]:
        """Gradients of pieces with those of what is computed once a batch, which no layer runs in."""
        values = overwritten(self.model.trainable_weights)
        pairs = enumerate(zip(gradients, extra, strict=True))
        return [a if index in values else self.engine.add(a, b) for index, (a, b) in pairs]


class _MixingOutputsError(Exception):
    """An output has nothing but samples, and Keras's losses and metrics reduce the last axis: that of the samples."""


class Carried:
    """Variables whose values come out of each piece: seeds, and metrics but for loss trackers.

    Each piece takes the metrics over from the one before it. The seeds are those that the batch began with: from them
    each draws its rows of the whole batch's numbers, and the same ones when it is computed a second time. After any
    piece they are as after the whole batch.
    """

    def __init__(self, seeds: list[Any], metrics: list[Any]) -> None:
        self.variables = [*seeds, *metrics]
        self.before = [ops.convert_to_tensor(v.value) for v in self.variables]
        self._seeds = len(seeds)

    def for_piece(self, state: list[Any]) -> list[tuple[Any, Any]]:
        values = [*self.before[: self._seeds], *state[self._seeds :]]
        return list(zip(self.variables, values, strict=True))

    def values_in(self, scope: PendingWrites) -> list[Any]:
        return [scope.get_current_value(variable) for variable in self.variables]


class Written:
    """What a piece wrote, learned while it is traced and needed to read the outcome of the loop."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.averaged: list[tuple[Any, Any]] = []


def _share(size: Any, batch_size: Any) -> Any:
    if isinstance(size, int) and isinstance(batch_size, int):
        return size / batch_size
    return ops.cast(size, "float64") / ops.cast(batch_size, "float64")


def _floating(value: Any) -> Any:
    return value if keras.backend.is_float_dtype(value.dtype) else ops.cast(value, keras.backend.floatx())


def _total(values: list[Any], dtype: Any) -> Any:
    first, *others = [ops.cast(value, dtype) for value in values if value is not None]
    return sum(others, first)


def _dot(targets: list[Any], slopes: list[Any]) -> Any:
    terms = [
        ops.sum(ops.cast(target * ops.cast(slope, target.dtype), "float32" if _is_half(target) else target.dtype))
        for target, slope in zip(targets, slopes, strict=True)
        if slope is not None
    ]
    return _total(terms, terms[0].dtype)


def _is_half(tensor: Any) -> bool:
    return keras_backend.standardize_dtype(tensor.dtype) in ("float16", "bfloat16")
