"""Writes that wait: everything a step would assign is computed first and assigned last.

Keras's StatelessScope holds back what layers and metrics assign. Optimizers on TensorFlow write past it, for the
sake of tf.distribute, so while one is traced here its TensorFlow overrides give way to Keras's neutral methods.
Assigning a finished tensor to a variable moves a pointer and allocates nothing: once the first assignment runs
nothing can run out of memory any more, and before it nothing has changed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from oomproof._backends.common.engine import PendingWrites as Pending
from oomproof._compat.keras import get_stateless_scope
from oomproof._compat.tensorflow import NEUTRAL_UPDATES, while_updating

# Appears in the name of every op of the update, and so in the error when one of them runs out of memory.
COMMIT_SCOPE = "oomproof_commit"

_SCATTERS: dict[str, Callable[..., Any]] = {
    "scatter_add": tf.tensor_scatter_nd_add,
    "scatter_sub": tf.tensor_scatter_nd_sub,
    "scatter_update": tf.tensor_scatter_nd_update,
}
_OPTIONS: dict[str, dict[str, Any]] = {"assign": {"read_value": False}}


class PendingWrites(Pending):
    """A scope in which Keras variables can be written, and nothing reaches the real ones until `commit`.

    Args:
        trainable: Read as the variables they are, so that gradients and sparse reads work as without a scope.
        state: (variable, value) pairs that replace the value of a variable inside the scope.
    """

    def __init__(self, trainable: Sequence[Any], state: Sequence[tuple[Any, Any]] = ()) -> None:
        values = {id(variable): variable._value for variable in trainable}
        super().__init__(values | {id(variable): value for variable, value in state})
        self._differentiated = {id(variable) for variable in trainable}
        self.updating = False
        self._scattered: dict[int, tuple[Any, list[tuple[str, tf.IndexedSlices]]]] = {}

    def add_update(self, update: tuple[Any, Any]) -> None:
        variable, value = update
        # Keras hands a variable through as it is: what counts is its value now, not at the commit.
        value = tf.convert_to_tensor(value)
        if id(variable) in self._differentiated:
            # Gradients end at an assignment and start anew at the variable, here as in a real one.
            value = tf.stop_gradient(value) + (variable._value - tf.stop_gradient(variable._value))
        self._scattered.pop(id(variable), None)
        super().add_update((variable, value))

    def add_scatter(self, variable: Any, kind: str, slices: tf.IndexedSlices) -> None:
        """A sparse write. It stays sparse unless somebody reads the variable before the commit."""
        if id(variable) in self.written:
            dense = _SCATTERS[kind](self.state_mapping[id(variable)], slices.indices[:, None], slices.values)
            self.add_update((variable, dense))
        else:
            self._scattered.setdefault(id(variable), (variable, []))[1].append((kind, slices))

    def get_current_value(self, variable: Any) -> Any:
        if id(variable) in self._scattered:
            _, scatters = self._scattered[id(variable)]
            value = tf.convert_to_tensor(variable._value)
            for kind, slices in scatters:
                value = _SCATTERS[kind](value, slices.indices[:, None], slices.values)
            self.add_update((variable, value))
        return self.state_mapping.get(id(variable))

    def end_of_gradients(self) -> None:
        """From here on writes are the update itself, which nothing is differentiated through."""
        self._differentiated = set()
        self.updating = True

    def settled(self) -> list[tuple[Any, Any]]:
        """(variable, new value) of every write, none of them sparse any more."""
        for variable, _ in list(self._scattered.values()):
            self.get_current_value(variable)
        return [(variable, tf.cast(value, variable._value.dtype)) for variable, value in self.pending()]

    def writes(self) -> list[tuple[Any, str, Any]]:
        """(variable, how it is written, what is written), sparse writes first."""
        sparse = [(v, kind, slices) for v, scatters in self._scattered.values() for kind, slices in scatters]
        return sparse + [(v, "assign", tf.cast(value, v._value.dtype)) for v, value in self.pending()]


def commit(writes: Sequence[tuple[Any, str, Any]], results: Sequence[Any]) -> None:
    """Writes everything, once everything has been computed, `results` included."""
    if tf.executing_eagerly():
        _commit_eagerly(writes)
        return
    values = [value.values if isinstance(value, tf.IndexedSlices) else value for *_, value in writes]
    # What has an effect runs though nobody takes its result, and could fail when half of the writing is done.
    effects = [op for op in _graph().get_operations() if op.op_def.is_stateful]
    with after([*values, *(result for result in results if tf.is_tensor(result)), *effects]):
        for variable, kind, value in writes:
            getattr(variable._value, kind)(value, **_OPTIONS.get(kind, {}))


def _commit_eagerly(writes: Sequence[tuple[Any, str, Any]]) -> None:
    """Writes one after the other such that all of it is done or none, also when Ctrl-C comes in between.

    Sparse writes come first. They add to what is there, so they cannot be begun again: their rows are put back. Whole
    values can.
    """
    kept: list[tuple[Any, Any]] = []
    sparse_are_done = False

    def assign() -> None:
        for variable, kind, value in writes:
            if kind == "assign":
                variable._value.assign(value, **_OPTIONS[kind])

    def put_back() -> None:
        for variable, rows in reversed(kept):
            variable._value.scatter_update(rows)

    try:
        for variable, kind, value in writes:
            if kind != "assign":
                kept.append((variable, tf.IndexedSlices(tf.gather(variable._value, value.indices), value.indices)))
                getattr(variable._value, kind)(value)
        sparse_are_done = True
        assign()
    except BaseException:
        recover = assign if sparse_are_done else put_back
        try:
            recover()
        except BaseException:
            # Some press it twice.
            recover()
        raise


def _graph() -> Any:
    return tf.compat.v1.get_default_graph()


@contextlib.contextmanager
def after(tensors: Sequence[Any]) -> Iterator[None]:
    """Ops made inside run after all of the tensors, or ops, are done. Eagerly that is so by itself."""
    if tf.executing_eagerly() or not tensors:
        yield
        return
    # One op to wait for: a control edge from each tensor to each op would be quadratic.
    with tf.control_dependencies([tf.group(*tensors)]):
        yield


def apply_gradients(optimizer: Any, gradients: Sequence[Any], variables: Sequence[Any], scope: PendingWrites) -> None:
    """What Keras's own step calls, with every write left pending in the scope, which must be the current one."""
    scope.end_of_gradients()
    dense = [g.values if isinstance(g, tf.IndexedSlices) else g for g in gradients if g is not None]
    # Waiting for all gradients means that activations are gone before new values are made: lower peak.
    with _KERAS_GIVES_WAY, tf.name_scope(COMMIT_SCOPE), after(dense):
        optimizer.apply_gradients(zip(gradients, variables, strict=True))


def writes_cannot_wait(optimizer: Any) -> bool:
    """ScheduleFreeAdamW takes hold of a variable before it writes to it and reads it afterwards."""
    kind = getattr(keras.optimizers, "ScheduleFreeAdamW", ())
    return isinstance(getattr(optimizer, "inner_optimizer", optimizer), kind)


def _updating_scope() -> PendingWrites | None:
    """The scope whose update is being made in this thread, if any."""
    scope = get_stateless_scope()
    return scope if isinstance(scope, PendingWrites) and scope.updating else None


def _deferred(kind: str, combine: Callable[[Any, Any], Any]) -> Callable[[Any, Any, Any], None]:
    def write(optimizer: Any, variable: Any, value: Any) -> None:
        value = tf.cast(value, variable._value.dtype)
        scope = _updating_scope()
        if isinstance(value, tf.IndexedSlices) and scope is not None:
            scope.add_scatter(variable, kind, value)
        else:
            variable.assign(combine(variable, value))

    return write


def _var_key(optimizer: Any, variable: Any) -> Any:
    """Keras looks a variable up by its tf.Variable, which `.value` is not while a write is pending."""
    return (variable._value if isinstance(variable, keras.Variable) else variable)._unique_id


# What takes the place of TensorFlow's overrides while an update is made here. A subclass's own method stays.
_NEUTRAL: dict[str, Callable[..., Any]] = {
    **NEUTRAL_UPDATES,
    "assign": _deferred("scatter_update", lambda old, new: new),
    "assign_add": _deferred("scatter_add", lambda old, new: old + new),
    "assign_sub": _deferred("scatter_sub", lambda old, new: old - new),
    "_var_key": _var_key,
}


def _deferring_cond(original: Callable[..., Any]) -> Callable[..., Any]:
    """A `keras.ops.cond` whose branches may write: what they write becomes an output of the cond."""

    def cond(pred: Any, true_fn: Callable[[], Any], false_fn: Callable[[], Any]) -> Any:
        outer = _updating_scope()
        if outer is None:
            return original(pred, true_fn, false_fn)
        pred = tf.cast(pred, "bool")
        if tf.executing_eagerly():
            return true_fn() if bool(pred) else false_fn()
        touched: dict[int, Any] = {}
        for branch in (true_fn, false_fn):
            # Traced into a graph that is thrown away, only to see which variables it writes.
            with tf.__internal__.FuncGraph("branch").as_default(), _branch_of(outer) as scope:
                branch()
            touched.update(scope.written)
            touched.update({key: variable for key, (variable, _) in scope._scattered.items()})
        variables = list(touched.values())

        def outputs(branch: Callable[[], Any]) -> Callable[[], Any]:
            def run() -> Any:
                with _branch_of(outer) as scope:
                    result = branch()
                    # A new tensor each: the branches of a cond must agree in what they return.
                    values = [tf.convert_to_tensor(v.value) for v in variables]
                del scope
                return ([] if result is None else [result]), values

            return run

        result, values = tf.cond(pred, outputs(true_fn), outputs(false_fn))
        for variable, value in zip(variables, values, strict=True):
            value.set_shape(variable.shape)
            outer.add_update((variable, value))
        return result[0] if result else None

    return cond


def _branch_of(outer: PendingWrites) -> PendingWrites:
    scope = PendingWrites(())
    scope.state_mapping.update(outer.state_mapping)
    scope._scattered = dict(outer._scattered)
    scope.updating = outer.updating
    return scope


# Only where a scope of ours is being updated do they differ from Keras's.
_KERAS_GIVES_WAY = while_updating(lambda: _updating_scope() is not None, _NEUTRAL, _deferring_cond)
