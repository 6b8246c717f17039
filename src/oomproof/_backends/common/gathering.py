"""All predictions are computed piece by piece, the loss once on all of them, then the gradient piece by piece.

The gradient comes from the loss's derivative with respect to the predictions. One more forward pass, and exact for any
loss that depends on predictions and targets: Dice, contrastive losses, own `compute_loss`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from keras import ops

from oomproof._backends.common.computing import share_of, total
from oomproof._backends.common.engine import Outcome
from oomproof._backends.common.model import first_tensor, uses_kept_tensor
from oomproof._backends.common.predictions import Predictions, check_rows, check_same_rows, rows_of_piece
from oomproof._backends.common.split_batch import SplitBatch
from oomproof._compat.keras import get_stateless_scope, standardize_dtype


class Gathering(SplitBatch):
    """A batch whose loss is computed on the predictions of all pieces."""

    def computed(self) -> tuple[list[Any], Any]:
        """Gradients and logs."""
        rows, added = self._forward()
        self.model._clear_losses()
        direct, upstream = self._loss(rows, added)
        y_pred = self.computing.for_metrics(self.predictions, rows, self.training)
        logs = self.model.compute_metrics(self.x, self.y, y_pred, sample_weight=self.sample_weight)
        if not direct or all(slope is None for slope in upstream):
            # Nothing to differentiate, or a loss that uses no predictions, such as one that calls the model itself.
            return direct, logs
        return self.computing.together(self._backward(upstream), direct), logs

    def _forward(self) -> tuple[list[Any], list[Any]]:
        """Predictions of the whole batch, and the losses that layers add to it."""
        outcome = self.over_pieces(self._forward_piece)
        sums = iter(outcome.sums)
        added = [next(sums) for _ in self.computing.added_losses[self.training]]
        check_rows(outcome.rows, self.size)
        rows = self.engine.opened(outcome.rows) if self.computing.open_size else self._sized(outcome.rows)
        self.writes.write_back(outcome.state, sums)
        return rows, added

    def _forward_piece(self, start: Any, size: Any, state: list[Any]) -> Outcome:
        x, _, _ = self.take(start, size)
        share = share_of(size, self.size)

        def compute() -> tuple[Any, list[Any]]:
            with self.writes.recorded() as moments:
                y_pred = self.engine.call(x, self.training)
            rows = self.predictions.flat(y_pred)
            check_rows(rows, size)
            return None, [*rows, *self.computing.added(share, self.training), *moments]

        with self.piece(start, size, state) as scope:
            results = self.engine.run(compute)
        rows, sums = results[: self.predictions.count], results[self.predictions.count :]
        averages = self.writes.averages_in(scope, share)
        return Outcome(state=self.writes.state_in(scope), sums=[*sums, *averages], rows=rows)

    def _sized(self, rows: list[Any]) -> list[Any]:
        """The same tensors, with as many rows known while tracing as Keras would know: it weights losses by that."""
        shown = self.model._compile_loss
        if shown is None or len(shown._flat_losses or ()) < 2 or not isinstance(first_tensor(self.x).shape[0], int):
            return rows
        return self.engine.sized(rows, lambda: Predictions().flat(self.engine.call(self.x, self.training)))

    def _loss(self, rows: list[Any], added: list[Any]) -> tuple[list[Any], list[Any]]:
        """Gradients of the loss by weights that it uses itself, and by each of the predictions and added losses."""

        def compute(*inputs: Any) -> tuple[Any, list[Any]]:
            scope = get_stateless_scope()
            for value in inputs[self.predictions.count :]:
                # Keras finds the losses of a call by the identity of their tensors.
                scope.losses.append(value)
                self.model._loss_ids.add(id(value))
            y_pred = self.predictions.restored(list(inputs[: self.predictions.count]))
            with self._without_pieces(), self.engine.losses_of_call():
                loss = self.model._compute_loss(
                    x=self.x, y=self.y, y_pred=y_pred, sample_weight=self.sample_weight, training=self.training
                )
            self.model._loss_tracker.update_state(loss, sample_weight=self.engine.samples_for_keras(self.x))
            return self.computing.scaled(loss), []

        _, direct, upstream = self.computing.run(compute, self.training, [*rows, *added])
        return direct, upstream

    @contextlib.contextmanager
    def _without_pieces(self) -> Iterator[None]:
        """Around what is computed on the predictions of the whole batch, where tensors of a piece are gone."""
        try:
            yield
        except self.engine.gone as error:
            raise uses_kept_tensor(self.model) from error

    def _backward(self, upstream: list[Any]) -> list[Any]:
        """Gradients by the weights, from those by predictions and added losses."""
        per_sample, per_loss = upstream[: self.predictions.count], upstream[self.predictions.count :]

        def piece(start: Any, size: Any, state: list[Any]) -> Outcome:
            x, _, _ = self.take(start, size)
            slopes = rows_of_piece(self.engine, per_sample, self.size, start, size)

            def compute() -> tuple[Any, list[Any]]:
                leaves = self.predictions.flat(self.engine.call(x, True))
                check_same_rows(self.engine, leaves, slopes)
                targets = [*leaves, *self.computing.added(share_of(size, self.size), True)]
                # Its derivative by each target is that target's slope.
                return dot(targets, [*slopes, *per_loss]), []

            with self.piece(start, size, state) as scope:
                _, gradients, _ = self.engine.differentiate(compute)
            return Outcome(state=self.writes.state_in(scope), gradients=gradients)

        return self.over_pieces(piece).gradients


def dot(targets: list[Any], slopes: list[Any]) -> Any:
    terms = [
        ops.sum(ops.cast(target * ops.cast(slope, target.dtype), "float32" if _is_half(target) else target.dtype))
        for target, slope in zip(targets, slopes, strict=True)
        if slope is not None
    ]
    return total(terms, terms[0].dtype)


def _is_half(tensor: Any) -> bool:
    return standardize_dtype(tensor.dtype) in ("float16", "bfloat16")
