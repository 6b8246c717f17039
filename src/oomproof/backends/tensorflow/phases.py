"""What one logical batch computes, traced as a graph or run eagerly: loss, gradients, metrics, and pending writes.

Nothing here writes to a variable. A batch is computed whole, exactly as Keras's own train_step does, or in pieces:

streaming   Each piece computes its exact share of the batch's loss and its gradient. For Keras's own losses.
gathering   All predictions are computed piece by piece, the loss once on all of them, and then the gradient piece
            by piece from the loss's derivative with respect to the predictions. One more forward pass, and exact
            for any loss that depends on predictions and targets: Dice, contrastive losses, own `compute_loss`.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf
from keras import tree
from keras.src import backend as keras_backend
from keras.src.backend.common.stateless_scope import get_stateless_scope

from oomproof.backends.common import losses, statistics
from oomproof.backends.common.model import (
    call,
    first_tensor,
    fixed_regularisers,
    losses_stream,
    metrics_stream,
    seed_variables,
    statistics_layers,
    tracker_variables,
    unpack,
)
from oomproof.backends.tensorflow.pieces import Outcome, over_pieces, size_of, take
from oomproof.backends.tensorflow.writes import PendingWrites
from oomproof.errors import UnsupportedModelError


class Phases:
    """The computations of one built and compiled model.

    Args:
        model: The model.
        added_losses: How each loss from `add_loss` and activity regularisers behaves under splitting, `"mean"` or
            `"sum"`, in the order the layers add them: while training and otherwise.
        static: Whether piece sizes must be known while tracing (XLA).
        open_size: Whether Keras would have traced with the batch size left open though it is known here. Keras
            weights the losses of several outputs by the batch size where it knows it.
    """

    def __init__(
        self, model: Any, added_losses: Mapping[bool, Sequence[str]], static: bool, open_size: bool = False
    ) -> None:
        self.model = model
        self.added_losses = added_losses
        self.static = static
        self.open_size = open_size

    def scope(self, state: Sequence[tuple[Any, Any]] = ()) -> PendingWrites:
        return PendingWrites(self.model.trainable_variables, state)

    # Whole batches

    def whole(self, data: Any, training: bool) -> tuple[list[Any], Any]:
        """Gradients and logs of a batch computed in one go. Runs inside a scope."""
        model = self.model
        x, y, sample_weight = unpack(data)
        with tf.GradientTape(watch_accessed_variables=training) as tape:
            y_pred = call(model, x, training)
            loss = model._compute_loss(x=x, y=y, y_pred=y_pred, sample_weight=sample_weight, training=training)
            model._loss_tracker.update_state(loss, sample_weight=tf.shape(first_tensor(x))[0])
            scaled = self._scaled(loss)
        gradients = self._gradient(tape, scaled) if training else []
        return gradients, model.compute_metrics(x, y, y_pred, sample_weight=sample_weight)

    def _scaled(self, loss: Any) -> Any:
        return loss if self.model.optimizer is None else self.model.optimizer.scale_loss(loss)

    def loss_scale(self) -> Any:
        """What mixed precision multiplies the loss with."""
        return tf.cast(self._scaled(tf.constant(1.0)), tf.float32)

    def _gradient(self, tape: tf.GradientTape, target: Any, output_gradients: Any = None) -> list[Any]:
        variables = [variable._value for variable in self.model.trainable_weights]
        if not variables:
            warnings.warn("The model does not have any trainable weights.", stacklevel=2)
            return []
        gradients: list[Any] = tape.gradient(target, variables, output_gradients=output_gradients)
        for gradient, variable in zip(gradients, variables, strict=True):
            if isinstance(gradient, tf.Tensor):
                # Not always known while tracing, such as that of a kernel applied to sequences.
                gradient.set_shape(variable.shape)
        return gradients

    # Batches in pieces

    def split(self, data: Any, count: Any, training: bool) -> tuple[list[Any], Any]:
        """Gradients and logs of a batch computed in `count` pieces. Runs inside a scope."""
        if losses_stream(self.model):
            with contextlib.suppress(_MixingOutputsError):
                try:
                    return self._stream(data, count, training, self._may_mask(data))
                except losses.UncountedNormaliserError:
                    return self._stream(data, count, training, counted=True)
        return self._gather(data, count, training)

    def _stream(self, data: Any, count: Any, training: bool, counted: bool) -> tuple[list[Any], Any]:
        model = self.model
        x, y, sample_weight = unpack(data)
        batch_size = size_of(first_tensor(x))
        by_pieces = metrics_stream(model)
        carried = self._carried()
        totals = self._normalisers(data, count, batch_size, training, carried) if counted else []
        book = Bookkeeping()

        def piece(start: Any, size: Any, state: list[Any]) -> Outcome:
            x, y, sample_weight = unpack(take(data, start, size))
            share = _share(size, batch_size)
            scope = self.scope(list(zip(carried, state, strict=True)))
            layers = statistics_layers(model) if training else []
            with scope, statistics.recorded(layers) as moments:
                reductions = losses.Reductions(totals, share)
                with tf.GradientTape(watch_accessed_variables=training) as tape:
                    y_pred = call(model, x, training)
                    if any(len(leaf.shape) < 2 for leaf in tree.flatten(y_pred)):
                        raise _MixingOutputsError
                    # Around the compiled loss alone: a loss inside of the model is none of its shares.
                    with losses.replaced_by(reductions):
                        compiled = model._compile_loss(y, y_pred, sample_weight)
                    added = self._added(scope, share, training)
                    scaled = self._scaled(_total([compiled, *added], compiled.dtype))
                gradients = self._gradient(tape, scaled) if training else []
                if by_pieces and model._compile_metrics is not None:
                    model._compile_metrics.update_state(y, y_pred, sample_weight)
            book.note(gradients, y_pred, moments, self._averaged(scope, carried, layers))
            return Outcome(
                state=[scope.get_current_value(variable) for variable in carried],
                sums=[
                    compiled,
                    *added,
                    *reductions.values,
                    *(sum_ for _, sums in moments for sum_ in sums),
                    *(_weighted(value, share) for _, value in book.averaged),
                    *(_widened(g) for g in gradients if not isinstance(g, tf.IndexedSlices)),
                ],
                slices=[g for g in gradients if isinstance(g, tf.IndexedSlices)],
                rows=[] if by_pieces else _with_masks(y_pred),
            )

        outcome = over_pieces(piece, batch_size, count, [tf.convert_to_tensor(v.value) for v in carried], self.static)
        sums = iter(outcome.sums)
        compiled = next(sums)
        added = [next(sums) for _ in self.added_losses[training]]
        terms = [next(sums) for _ in model._compile_loss._flat_losses]
        self._write_back(carried, outcome.state, book, sums)
        gradients, penalty = self._with_regularisers(book.gradients(model, sums, outcome.slices), training)
        if len(terms) > 1 and (tree.is_nested(y) or book.nested_outputs):
            for metric, term in zip(model._compile_loss.metrics, terms, strict=True):
                # Weighted as Keras does it: by the batch size where that is known while tracing.
                metric.update_state(term, sample_weight=None if self.open_size else first_tensor(x).shape[0])
        loss = _total([compiled, *added, penalty], compiled.dtype)
        model._loss_tracker.update_state(loss, sample_weight=tf.shape(first_tensor(x))[0])
        if by_pieces:
            return gradients, model.get_metrics_result()
        y_pred = book.predictions(outcome.rows)
        return gradients, model.compute_metrics(x, y, y_pred, sample_weight=sample_weight)

    def _normalisers(self, data: Any, count: Any, batch_size: Any, training: bool, carried: list[Any]) -> list[Any]:
        """Normalisers of the whole batch, for losses whose normaliser depends on masks or weights.

        In a graph nothing but what the normalisers depend on is run: for a mask of the inputs, next to nothing.
        """

        def piece(start: Any, size: Any, state: list[Any]) -> Outcome:
            x, y, sample_weight = unpack(take(data, start, size))
            reductions = losses.Reductions(None, _share(size, batch_size))
            with self.scope(list(zip(carried, state, strict=True))) as scope:
                y_pred = call(self.model, x, training)
                with losses.replaced_by(reductions):
                    self.model._compile_loss(y, y_pred, sample_weight)
            return Outcome(state=[scope.get_current_value(v) for v in carried], sums=reductions.normalisers)

        return over_pieces(piece, batch_size, count, [tf.convert_to_tensor(v.value) for v in carried], self.static).sums

    def _may_mask(self, data: Any) -> bool:
        """Whether normalisers are expected to depend on more than the number of samples. It saves a trace if not."""
        *_, sample_weight = unpack(data)
        masked = any(layer.supports_masking and _makes_mask(layer) for layer in self.model._flatten_layers())
        flat = [loss for _, loss, _, _ in self.model._compile_loss._flat_losses]
        weighted = sample_weight is not None and any(loss.reduction == "mean_with_sample_weight" for loss in flat)
        return masked or weighted or any(getattr(loss, "ignore_class", None) is not None for loss in flat)

    def _gather(self, data: Any, count: Any, training: bool) -> tuple[list[Any], Any]:
        model = self.model
        x, y, sample_weight = unpack(data)
        batch_size = size_of(first_tensor(x))
        carried = self._carried()
        book = Bookkeeping()

        def forward(start: Any, size: Any, state: list[Any]) -> Outcome:
            inputs, _, _ = unpack(take(data, start, size))
            share = _share(size, batch_size)
            scope = self.scope(list(zip(carried, state, strict=True)))
            layers = statistics_layers(model) if training else []
            with scope, statistics.recorded(layers) as moments:
                y_pred = call(model, inputs, training)
            book.note([], y_pred, moments, self._averaged(scope, carried, layers))
            return Outcome(
                state=[scope.get_current_value(variable) for variable in carried],
                sums=[
                    *self._added(scope, share, training),
                    *(sum_ for _, sums in moments for sum_ in sums),
                    *(_weighted(value, share) for _, value in book.averaged),
                ],
                rows=_with_masks(y_pred),
            )

        before = [tf.convert_to_tensor(v.value) for v in carried]
        outcome = over_pieces(forward, batch_size, count, before, self.static)
        sums = iter(outcome.sums)
        added = [next(sums) for _ in self.added_losses[training]]
        y_pred = book.predictions([_of_open_size(row) for row in outcome.rows] if self.open_size else outcome.rows)
        self._write_back(carried, outcome.state, book, sums)
        scope = get_stateless_scope()
        model._clear_losses()
        for value in added:
            # Keras finds the losses of a call by the identity of their tensors.
            scope.losses.append(value)
            model._loss_ids.add(id(value))
        with tf.GradientTape(watch_accessed_variables=training) as tape:
            outputs = tree.flatten(y_pred)
            if training:
                tape.watch([*outputs, *added])
            loss = model._compute_loss(x=x, y=y, y_pred=y_pred, sample_weight=sample_weight, training=training)
            model._loss_tracker.update_state(loss, sample_weight=tf.shape(first_tensor(x))[0])
            scaled = self._scaled(loss)
        logs = model.compute_metrics(x, y, y_pred, sample_weight=sample_weight)
        if not training or not model.trainable_weights:
            return (self._gradient(tape, scaled) if training else []), logs
        sources = [*outputs, *added, *(variable._value for variable in model.trainable_weights)]
        derivatives = tape.gradient(scaled, sources)
        upstream, direct = derivatives[: len(outputs) + len(added)], derivatives[len(outputs) + len(added) :]
        wanted = [d is not None for d in upstream]
        per_sample = [d for d in upstream[: len(outputs)] if d is not None]
        per_loss = [d for d in upstream[len(outputs) :] if d is not None]

        def backward(start: Any, size: Any, state: list[Any]) -> Outcome:
            inputs, _, _ = unpack(take(data, start, size))
            scope = self.scope(list(zip(carried, state, strict=True)))
            with scope, tf.GradientTape() as tape:
                predictions = tree.flatten(call(model, inputs, True))
                targets = [*predictions, *self._added(scope, _share(size, batch_size), True)]
            targets = [target for target, want in zip(targets, wanted, strict=True) if want]
            gradients = self._gradient(tape, targets, [*take(per_sample, start, size), *per_loss])
            book.note(gradients, None, [], [])
            return Outcome(
                state=[scope.get_current_value(variable) for variable in carried],
                sums=[_widened(g) for g in gradients if not isinstance(g, tf.IndexedSlices)],
                slices=[g for g in gradients if isinstance(g, tf.IndexedSlices)],
            )

        # From the same seeds as before, so that random layers draw the same numbers again.
        outcome = over_pieces(backward, batch_size, count, before, self.static)
        gradients = book.gradients(model, iter(outcome.sums), outcome.slices)
        return [_add(a, b) for a, b in zip(gradients, direct, strict=True)], logs

    # What pieces share

    def _carried(self) -> list[Any]:
        """Variables that each piece takes over from the one before: seeds and metrics, but not loss trackers."""
        trackers = {id(v) for v in tracker_variables(self.model)}
        metrics = [v for v in self.model.metrics_variables if id(v) not in trackers]
        return seed_variables(self.model) + metrics

    def _added(self, scope: PendingWrites, share: Any, training: bool) -> list[Any]:
        """The piece's share of every loss that layers added."""
        kinds = self.added_losses[training]
        if len(scope.losses) != len(kinds):
            raise UnsupportedModelError(
                f"The model's layers added {len(scope.losses)} losses to this batch and {len(kinds)} when they were "
                "examined. A batch whose number of losses changes cannot be cut: add a loss of zero instead of none."
            )
        values = [tf.reduce_sum(self._floating(value)) for value in scope.losses]
        return [_weighted(value, share) if kind == "mean" else value for value, kind in zip(values, kinds, strict=True)]

    def _floating(self, value: Any) -> Any:
        return value if keras.backend.is_float_dtype(value.dtype) else tf.cast(value, keras.backend.floatx())

    def _averaged(self, scope: PendingWrites, carried: list[Any], recorded: list[Any]) -> list[tuple[Any, Any]]:
        """Other state that layers wrote, to be averaged over pieces: exact for running means of the batch."""
        handled = {id(v) for v in [*carried, *tracker_variables(self.model)]}
        for layer in recorded:
            handled |= {id(statistic) for statistic in layer.non_trainable_variables}
        return [(variable, value) for variable, value in scope.pending() if id(variable) not in handled]

    def _write_back(self, carried: list[Any], state: list[Any], book: Bookkeeping, sums: Any) -> None:
        for variable, value in zip(carried, state, strict=True):
            variable.assign(value)
        statistics.advance(book.calls, [next(sums) for _ in range(3 * len(book.calls))])
        for variable, value in book.averaged:
            mean = next(sums)
            # Averages of whole numbers are taken in floating point; counters come back as they went in.
            variable.assign(tf.cast(mean if value.dtype.is_floating else tf.round(mean), value.dtype))

    def _with_regularisers(self, gradients: list[Any], training: bool) -> tuple[list[Any], Any]:
        """Adds the weight penalties, which count once a batch."""
        variables = fixed_regularisers(self.model)
        if not variables:
            return gradients, None
        with tf.GradientTape(watch_accessed_variables=training) as tape:
            penalty = tf.add_n([self._floating(tf.reduce_sum(v.regularizer(v.value))) for v in variables])
            scaled = self._scaled(penalty)
        if not training:
            return gradients, penalty
        extra = self._gradient(tape, scaled)
        return [_add(a, b) for a, b in zip(gradients, extra, strict=True)], penalty


class _MixingOutputsError(Exception):
    """An output has nothing but samples, and Keras's losses and metrics reduce the last axis: that of the samples."""


class Bookkeeping:
    """What is learned of a piece's structure while it is traced, and needed to read the outcome of the loop."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.averaged: list[tuple[Any, Any]] = []
        self._kinds: list[tuple[bool, Any]] = []
        self._structure: Any = None
        self._masked: list[bool] = []

    def note(self, gradients: list[Any], y_pred: Any, moments: list[Any], averaged: list[tuple[Any, Any]]) -> None:
        if gradients:
            self._kinds = [(isinstance(g, tf.IndexedSlices), None if g is None else g.dtype) for g in gradients]
        if y_pred is not None:
            self.calls = [layer for layer, _ in moments]
            self.averaged = averaged
            self._structure = y_pred
            self._masked = [keras_backend.get_keras_mask(leaf) is not None for leaf in tree.flatten(y_pred)]

    @property
    def nested_outputs(self) -> bool:
        return bool(tree.is_nested(self._structure))

    def gradients(self, model: Any, sums: Any, slices: list[tf.IndexedSlices]) -> list[Any]:
        rows = iter(slices)
        found = []
        for variable, (sparse, dtype) in zip(model.trainable_weights, self._kinds, strict=False):
            if sparse:
                piece = next(rows)
                shape = tf.constant(tuple(variable.shape), piece.indices.dtype)
                found.append(tf.IndexedSlices(piece.values, piece.indices, dense_shape=shape))
            else:
                total = next(sums)
                found.append(None if total is None else tf.cast(total, dtype))
        return found

    def predictions(self, rows: list[Any]) -> Any:
        """The predictions of the whole batch, with their masks."""
        remaining = iter(rows)
        leaves = []
        for masked in self._masked:
            leaf = next(remaining)
            if masked:
                keras_backend.set_keras_mask(leaf, next(remaining))
            leaves.append(leaf)
        return tree.pack_sequence_as(self._structure, leaves)


def _share(size: Any, batch_size: Any) -> Any:
    return tf.cast(size, tf.float64) / tf.cast(batch_size, tf.float64)


def _weighted(value: Any, share: Any) -> Any:
    if not value.dtype.is_floating:
        value = tf.cast(value, tf.float64)
    return value * tf.cast(share, value.dtype)


def _widened(gradient: Any) -> Any:
    """Half precision loses the small pieces of a sum."""
    return tf.cast(gradient, tf.float32) if gradient is not None and gradient.dtype.size < 4 else gradient


def _total(values: list[Any], dtype: Any) -> Any:
    return tf.add_n([tf.cast(value, dtype) for value in values if value is not None])


def _with_masks(y_pred: Any) -> list[Any]:
    rows = []
    for leaf in tree.flatten(y_pred):
        if len(leaf.shape) == 0:
            raise UnsupportedModelError(
                "An output of the model is a scalar, without a row for each sample, so a batch of it cannot be cut. "
                "Give every output a batch dimension, or lower the batch size."
            )
        rows.append(leaf)
        if (mask := keras_backend.get_keras_mask(leaf)) is not None:
            rows.append(mask)
    return rows


def _of_open_size(tensor: Any) -> Any:
    """The same tensor, with its first dimension unknown while tracing."""
    return tf.raw_ops.PlaceholderWithDefault(input=tensor, shape=[None, *tensor.shape[1:]])


def _makes_mask(layer: Any) -> bool:
    """Whether a layer may bring a mask into the model. Layers of unknown kind may."""
    if isinstance(layer, keras.layers.Embedding):
        return bool(layer.mask_zero)
    if isinstance(layer, keras.layers.Masking | keras.layers.Lambda):
        return True
    return not type(layer).__module__.startswith("keras.src.")


def _add(a: Any, b: Any) -> Any:
    """Sum of two gradients of one variable, as backpropagation itself would add them."""
    if a is None or b is None:
        return b if a is None else a
    if isinstance(a, tf.IndexedSlices) and isinstance(b, tf.IndexedSlices):
        values, indices = tf.concat([a.values, b.values], 0), tf.concat([a.indices, b.indices], 0)
        return tf.IndexedSlices(values, indices, dense_shape=a.dense_shape)
    return tf.convert_to_tensor(a) + tf.convert_to_tensor(b)
