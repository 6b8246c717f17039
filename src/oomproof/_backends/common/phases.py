"""What one logical batch computes, in Keras's own terms: loss, gradients, metrics, and pending writes.

Nothing here writes to a variable. A batch is computed whole, exactly as Keras's own train_step does, or in pieces:
streaming (streaming.py) where the loss adds up over pieces, gathering (gathering.py) otherwise. Where it streams, the
head of the model may run in parts of its own (head.py).
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

from oomproof._backends.common import losses
from oomproof._backends.common.computing import Computing
from oomproof._backends.common.engine import Engine
from oomproof._backends.common.gathering import Gathering
from oomproof._backends.common.head import HeadInParts
from oomproof._backends.common.model import losses_stream, may_mask, metrics_stream, unpack
from oomproof._backends.common.predictions import Predictions
from oomproof._backends.common.streaming import MixingOutputsError, Streaming


class Phases(Computing):
    """The computations of one built and compiled model.

    Args:
        model: The model.
        engine: How the framework computes.
        added_losses: As for `Computing`.
        open_size: As for `Computing`.
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
        super().__init__(model, engine, added_losses, open_size)
        self._nothing_to_count = set[bool]() if nothing_to_count is None else nothing_to_count

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
            return self.scaled(loss), predictions.flat(y_pred)

        rows, gradients, _ = self.run(compute, training)
        y_pred = self.for_metrics(predictions, rows, training)
        return gradients, model.compute_metrics(x, y, y_pred, sample_weight=sample_weight)

    def split(self, data: Any, count: Any, training: bool) -> tuple[list[Any], Any]:
        """Gradients and logs of a batch computed in `count` pieces. Runs inside a scope."""
        # Of a batch that is not cut, nothing but the head runs in parts.
        head_alone = training and self.engine.head is not None and isinstance(count, int) and count == 1
        if losses_stream(self.model) and (metrics_stream(self.model) or not head_alone):
            with contextlib.suppress(MixingOutputsError):
                counted = may_mask(self.model, data) and training not in self._nothing_to_count
                try:
                    return self._stream(data, count, training, counted)
                except losses.UncountedNormaliserError:
                    return self._stream(data, count, training, counted=True)
        # What wants all predictions gets them, and the head runs with the rest.
        return self.whole(data, training) if head_alone else Gathering(self, data, count, training).computed()

    def _stream(self, data: Any, count: Any, training: bool, counted: bool) -> tuple[list[Any], Any]:
        by_parts = training and self.engine.head is not None and metrics_stream(self.model)
        kind = HeadInParts if by_parts else Streaming
        batch = kind(self, data, count, training)
        if counted:
            # A mask that pooling has used up reaches no loss. Where it does after all, that is found out.
            found = batch.count_normalisers()
            (self._nothing_to_count.discard if found else self._nothing_to_count.add)(training)
        return batch.computed()
