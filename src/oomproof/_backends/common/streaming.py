"""Each piece computes its exact share of the batch's loss, and its gradient. For Keras's own losses."""

from __future__ import annotations

from typing import Any

from keras import tree

from oomproof._backends.common import losses
from oomproof._backends.common.computing import Computing, share_of, total
from oomproof._backends.common.engine import Outcome
from oomproof._backends.common.model import first_tensor, metrics_stream, mixes_samples
from oomproof._backends.common.split_batch import SplitBatch


class MixingOutputsError(Exception):
    """An output has nothing but samples, and Keras's losses and metrics reduce the last axis: that of the samples."""


class Streaming(SplitBatch):
    """A batch whose pieces have shares in its loss that add up."""

    def __init__(self, computing: Computing, data: Any, count: Any, training: bool) -> None:
        super().__init__(computing, data, count, training)
        # Whether metrics are updated piece by piece.
        self._metrics_stream = metrics_stream(self.model)
        self._totals: list[Any] = []
        # How many losses layers add.
        self.added = len(computing.added_losses[training])

    def count_normalisers(self) -> bool:
        """Computes the normalisers of the whole batch, for losses whose normaliser depends on masks or weights.

        In a graph nothing but what the normalisers depend on is run: for a mask of the inputs, next to nothing.

        Returns:
            Whether there are any.
        """
        self._totals = self.over_pieces(self._normalisers).sums
        return bool(self._totals)

    def _normalisers(self, start: Any, size: Any, state: list[Any]) -> Outcome:
        x, y, sample_weight = self.take(start, size)

        def compute() -> tuple[Any, list[Any]]:
            y_pred = self.engine.call(x, self.training)
            return None, self.normalisers_of(y, y_pred, sample_weight, size)

        with self.piece(start, size, state) as scope:
            sums = self.engine.run(compute)
        return Outcome(state=self.writes.state_in(scope), sums=sums)

    def normalisers_of(self, y: Any, y_pred: Any, sample_weight: Any, size: Any) -> list[Any]:
        """Those of losses of so many samples."""
        reductions = losses.Reductions(None, share_of(size, self.size))
        with losses.replaced_by(reductions):
            self.model._compile_loss(y, y_pred, sample_weight)
        return reductions.normalisers

    def shares(self, y: Any, y_pred: Any, sample_weight: Any, size: Any) -> tuple[Any, list[Any]]:
        """What so many samples have of the compiled loss, and of each loss in it."""
        if mixes_samples(self.model, y_pred, size):
            raise MixingOutputsError
        reductions = losses.Reductions(self._totals, share_of(size, self.size))
        # Around the compiled loss alone: a loss inside of the model is none of its shares.
        with losses.replaced_by(reductions):
            compiled = self.model._compile_loss(y, y_pred, sample_weight)
        return compiled, reductions.values

    def update_metrics(self, y: Any, rows: list[Any], sample_weight: Any) -> None:
        """Those that add up over pieces, with the predictions of one."""
        if self._metrics_stream and self.model._compile_metrics is not None:
            y_pred = self.computing.for_metrics(self.predictions, rows, self.training)
            self.model._compile_metrics.update_state(y, y_pred, sample_weight)

    def computed(self) -> tuple[list[Any], Any]:
        """Gradients and logs."""
        model, computing = self.model, self.computing
        outcome = self.over_pieces(self._piece)
        sums = iter(outcome.sums)
        compiled = next(sums)
        added = [next(sums) for _ in range(self.added)]
        terms = [next(sums) for _ in model._compile_loss._flat_losses]
        self.writes.write_back(outcome.state, sums)
        gradients, penalty = computing.with_regularisers(outcome.gradients, self.training)
        self._show(terms)
        loss = total([compiled, *added, penalty], compiled.dtype)
        model._loss_tracker.update_state(loss, sample_weight=self.engine.samples_for_keras(self.x))
        if self._metrics_stream:
            return gradients, model.get_metrics_result()
        y_pred = computing.for_metrics(self.predictions, outcome.rows, self.training)
        return gradients, model.compute_metrics(self.x, self.y, y_pred, sample_weight=self.sample_weight)

    def _piece(self, start: Any, size: Any, state: list[Any]) -> Outcome:
        x, y, sample_weight = self.take(start, size)
        share = share_of(size, self.size)

        def compute() -> tuple[Any, list[Any]]:
            with self.writes.recorded() as moments:
                y_pred = self.engine.call(x, self.training)
            compiled, terms = self.shares(y, y_pred, sample_weight, size)
            added = self.computing.added(share, self.training)
            rows = self.predictions.flat(y_pred)
            loss = self.computing.scaled(total([compiled, *added], compiled.dtype))
            return loss, [*rows, compiled, *added, *terms, *moments]

        with self.piece(start, size, state) as scope:
            results, gradients, _ = self.computing.run(compute, self.training)
            rows, sums = results[: self.predictions.count], results[self.predictions.count :]
            self.update_metrics(y, rows, sample_weight)
        return Outcome(
            state=self.writes.state_in(scope),
            sums=[*sums, *self.writes.averages_in(scope, share)],
            gradients=gradients,
            rows=[] if self._metrics_stream else rows,
        )

    def _show(self, terms: list[Any]) -> None:
        """Updates the metrics by which Keras shows the losses of several outputs."""
        if len(terms) > 1 and (tree.is_nested(self.y) or self.predictions.nested):
            # Weighted as Keras does it: by the batch size where that is known while tracing.
            samples = None if self.computing.open_size else first_tensor(self.x).shape[0]
            for metric, term in zip(self.model._compile_loss.metrics, terms, strict=True):
                metric.update_state(term, sample_weight=samples)
