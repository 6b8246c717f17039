"""What whole batches and pieces of batches are computed with, in Keras's own terms."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import keras
from keras import ops

from oomproof._backends.common import losses
from oomproof._backends.common.engine import Compute, Engine
from oomproof._backends.common.model import fixed_regularisers, overwritten
from oomproof._backends.common.predictions import Predictions
from oomproof._compat.keras import get_stateless_scope
from oomproof.errors import UnsupportedModelError


class Computing:
    """What is computed of a batch in the same way, whole or in pieces.

    Args:
        model: The model.
        engine: How the framework computes.
        added_losses: How each loss from `add_loss` and activity regularisers behaves under splitting, `"mean"` or
            `"sum"`, in the order the layers add them: while training and otherwise.
        open_size: Whether Keras would have traced with the batch size left open though it is known here. Keras
            weights the losses of several outputs by the batch size where it knows it.
    """

    def __init__(
        self, model: Any, engine: Engine, added_losses: Mapping[bool, Sequence[str]], open_size: bool = False
    ) -> None:
        self.model = model
        self.engine = engine
        self.added_losses = added_losses
        self.open_size = open_size
        # Whether gradients are wanted of what trains.
        self.differentiates = True

    def run(
        self, compute: Compute, training: bool, inputs: Sequence[Any] = ()
    ) -> tuple[list[Any], list[Any], list[Any]]:
        """What `compute(*inputs)` hands on, and where the model trains, gradients by its weights and by the inputs."""
        if not training or not self.differentiates:
            return self.engine.run(compute, inputs), [], []
        if not self.model.trainable_weights:
            warnings.warn("The model does not have any trainable weights.", stacklevel=2)
            return self.engine.run(compute, inputs), [], []
        return self.engine.differentiate(compute, inputs)

    def scaled(self, loss: Any) -> Any:
        return loss if self.model.optimizer is None else self.model.optimizer.scale_loss(loss)

    def for_metrics(self, predictions: Predictions, rows: list[Any], training: bool) -> Any:
        return predictions.restored(rows, masks=self.engine.metrics_see_masks(training))

    def added(self, share: Any, training: bool) -> list[Any]:
        """The piece's share of every loss that layers added."""
        kinds, added = self.added_losses[training], get_stateless_scope().losses
        if len(added) != len(kinds):
            raise UnsupportedModelError(
                f"The model's layers added {len(added)} losses to this batch and {len(kinds)} when they were "
                "examined. A batch whose number of losses changes cannot be cut: add a loss of zero instead of none."
            )
        values = [ops.sum(floating(value)) for value in added]
        return [
            weighted(self.engine, value, share) if kind != "sum" else value
            for value, kind in zip(values, kinds, strict=True)
        ]

    def with_regularisers(self, gradients: list[Any], training: bool) -> tuple[list[Any], Any]:
        """Adds the weight penalties, which count once a batch."""
        variables = fixed_regularisers(self.model)
        if not variables:
            return gradients, None

        def compute() -> tuple[Any, list[Any]]:
            penalties = [floating(ops.sum(v.regularizer(v.value))) for v in variables]
            penalty = total(penalties, penalties[0].dtype)
            return self.scaled(penalty), [penalty]

        (penalty,), extra, _ = self.run(compute, training)
        return self.together(gradients, extra), penalty

    def together(self, gradients: list[Any], extra: list[Any]) -> list[Any]:
        """Gradients of pieces with those of what is computed once a batch, which no layer runs in."""
        values = overwritten(self.model.trainable_weights)
        pairs = enumerate(zip(gradients, extra, strict=True))
        return [a if index in values else self.engine.add(a, b) for index, (a, b) in pairs]


def share_of(size: Any, batch_size: Any) -> Any:
    """Samples of a piece / samples of the batch."""
    if isinstance(size, int) and isinstance(batch_size, int):
        return size / batch_size
    return ops.cast(size, "float64") / ops.cast(batch_size, "float64")


def weighted(engine: Engine, value: Any, share: Any) -> Any:
    if not keras.backend.is_float_dtype(value.dtype):
        value = ops.cast(value, engine.wide)
    return losses.times(value, share)


def total(values: list[Any], dtype: Any) -> Any:
    """The sum of all values but those that are `None`."""
    first, *others = [ops.cast(value, dtype) for value in values if value is not None]
    return sum(others, first)


def floating(value: Any) -> Any:
    return value if keras.backend.is_float_dtype(value.dtype) else ops.cast(value, keras.backend.floatx())
