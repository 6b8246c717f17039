"""Exact loss and gradients of a full batch, in pieces, for loops that are not Keras's."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf
from keras import tree

from oomproof._backends.common.batch import batch_leaves
from oomproof._backends.common.engine import Outcome
from oomproof._backends.common.own_loss import check_have_gradients, loss_of, own_loss
from oomproof._backends.tensorflow.pieces import finished, over_pieces, size_of, take
from oomproof._backends.tensorflow.writes import PendingWrites, after

# Programs of loss functions that are tf.functions, so that a loop compiles each of them once.
_programs: weakref.WeakKeyDictionary[Any, dict[tuple[Any, ...], Any]] = weakref.WeakKeyDictionary()


def full_batch_gradients(
    loss_fn: Callable[..., Any], variables: Sequence[Any], data: Any, micro_batch_size: int | None, has_aux: bool
) -> tuple[Any, list[Any]]:
    """See `oomproof.gradients`. Inside of a tf.function it becomes part of its graph."""
    check_have_gradients(variables)
    data = tree.map_structure(lambda leaf: leaf if leaf is None else tf.convert_to_tensor(leaf), data)
    size = size_of(batch_leaves(data)[0])
    # Inside of a graph the number of samples may be unknown: then so is the number of pieces.
    pieces = 1 if micro_batch_size is None else -(-size // micro_batch_size)
    python_function = getattr(loss_fn, "python_function", None)
    if python_function is None:
        return _compute(loss_fn, variables, data, pieces, has_aux)
    if not tf.executing_eagerly():
        return _compute(_with_control_flow(python_function), variables, data, pieces, has_aux)
    known = _programs.setdefault(loss_fn, {})
    key = (has_aux, *(id(variable) for variable in variables))
    if key not in known:
        # Not the tf.function itself: what it writes to Keras variables would stay inside of its graph.
        converted = _with_control_flow(python_function)
        known[key] = tf.function(
            lambda data, count: _compute(converted, variables, data, count, has_aux),
            reduce_retracing=True,
            autograph=False,
        )
    result, gradients = known[key](data, tf.cast(pieces, tf.int64))
    return result, gradients


def _with_control_flow(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function with its ifs and loops on tensors made graph ops, as tf.function itself would do."""
    try:
        converted: Callable[..., Any] = tf.autograph.to_graph(function)
    except Exception:
        # Without source code, as at a prompt, tf.function takes a function as it is too.
        return function
    return converted


def _compute(
    loss_fn: Callable[..., Any], variables: Sequence[Any], data: Any, pieces: Any, has_aux: bool
) -> tuple[Any, list[Any]]:
    tracked = [variable for variable in variables if isinstance(variable, keras.Variable)]
    values = [variable._value if isinstance(variable, keras.Variable) else variable for variable in variables]
    batch_size = size_of(batch_leaves(data)[0])
    carried = [] if isinstance(pieces, int) and pieces == 1 else _counters(loss_fn, tracked, data)
    written: list[tuple[Any, Any]] = []
    packings: list[Callable[[list[Any]], Any]] = []

    def piece(start: Any, size: Any, state: list[Any]) -> Outcome:
        scope = PendingWrites(tracked, list(zip(carried, state, strict=True)))
        with scope, tf.GradientTape() as tape:
            tape.watch(values)
            own = own_loss(loss_fn, take(data, start, size), size if isinstance(size, int) else None, has_aux)
        packings[:] = [own.packed]
        found = tape.gradient(own.total, values)
        for gradient, variable in zip(found, values, strict=True):
            if isinstance(gradient, tf.Tensor):
                gradient.set_shape(variable.shape)
        share = tf.cast(size, tf.float64) / tf.cast(batch_size, tf.float64)
        handed_on = {id(variable) for variable in carried}
        pending = [(variable, value) for variable, value in scope.pending() if id(variable) not in handed_on]
        written[:] = [(variable, value.dtype) for variable, value in pending]
        return Outcome(
            state=[scope.get_current_value(variable) for variable in carried],
            sums=[
                own.total,
                tf.cast(own.normaliser, own.total.dtype),
                *(tf.cast(value, tf.float64) * share for _, value in pending),
            ],
            gradients=found,
            rows=own.rows,
        )

    start = [tf.convert_to_tensor(variable.value) for variable in carried]
    outcome = over_pieces(piece, batch_size, pieces, start, static=False)
    sums = iter(outcome.sums)
    total, normaliser = next(sums), next(sums)
    means = [(variable, dtype, next(sums)) for variable, dtype in written]
    updates = [(v, tf.cast(mean if dtype.is_floating else tf.round(mean), dtype)) for v, dtype, mean in means]
    updates += zip(carried, outcome.state, strict=True)
    gradients = [_divided(gradient, normaliser) for gradient in finished(outcome.gradients, values)]
    loss = tf.math.divide_no_nan(total, normaliser)
    rows = [_with_a_row_each(leaf, batch_size) for leaf in outcome.rows]
    dense = [g.values if isinstance(g, tf.IndexedSlices) else g for g in gradients if g is not None]
    with after([loss, *dense, *rows, *(value for _, value in updates)]):
        for variable, value in updates:
            variable.assign(value)
    return (loss, packings[0](rows)) if has_aux else loss, gradients


def _with_a_row_each(leaf: Any, batch_size: Any) -> Any:
    """Auxiliary outputs of all pieces, whose sizes may not have been known while tracing."""
    wrong = "oomproof.gradients: an auxiliary output of `loss_fn` does not have a row for each sample"
    if not tf.executing_eagerly():
        tf.debugging.assert_equal(tf.shape(leaf, out_type=tf.int64)[0], tf.cast(batch_size, tf.int64), wrong)
    if isinstance(batch_size, int):
        leaf.set_shape([batch_size, *leaf.shape[1:]])
    return leaf


def _counters(loss_fn: Callable[..., Any], tracked: Sequence[Any], data: Any) -> list[Any]:
    """Integer state that the loss function writes, such as random seeds: each piece goes on from the one before."""
    scope = PendingWrites(tracked)
    try:
        with tf.__internal__.FuncGraph("state_of_loss_fn").as_default(), scope:
            loss_of(loss_fn, take(data, 0, 1))
    except Exception:
        # Code that only runs eagerly cannot be looked at this way; its state is averaged like any other.
        return []
    return [variable for variable, value in scope.pending() if value.dtype.is_integer]


def _divided(gradient: Any, normaliser: Any) -> Any:
    if gradient is None:
        return None
    if isinstance(gradient, tf.IndexedSlices):
        scaled = tf.math.divide_no_nan(gradient.values, tf.cast(normaliser, gradient.dtype))
        return tf.IndexedSlices(scaled, gradient.indices, gradient.dense_shape)
    return tf.math.divide_no_nan(gradient, tf.cast(normaliser, gradient.dtype))
