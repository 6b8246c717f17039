"""How JAX computes with a model: pure functions of all its values, differentiated and scanned."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax import numpy as jnp
from jax.experimental import sparse
from keras import tree

from oomproof._backends.common.drawing import RandomNumbers
from oomproof._backends.common.engine import Compute, Outcome, PendingWrites, Piece, taken_back
from oomproof._backends.common.head import HeadApart
from oomproof._backends.common.model import first_tensor, fixed_regularisers, overwritten
from oomproof._backends.common.predictions import insist
from oomproof._backends.common.recompute import recomputing
from oomproof._backends.jax.device import host_for_proofs
from oomproof._backends.jax.draws import JaxRandom
from oomproof._backends.jax.host_batches import is_on_host, to_device
from oomproof._backends.jax.state import assign
from oomproof._backends.pieces import largest_piece
from oomproof._compat.keras import get_stateless_scope, is_in_jax_tracing_scope
from oomproof._records.patience import look_at_the_clock


class JaxEngine(RandomNumbers, HeadApart):
    """See `common.engine.Engine`. Values of variables come from the scope alone, so that they can be traced."""

    tensor = jax.Array
    gone: tuple[type[Exception], ...] = (jax.errors.UnexpectedTracerError,)
    recompute: tuple[str, ...] = ()

    def __init__(self, model: Any) -> None:
        super().__init__(model, JaxRandom())
        self.model = model
        # Inside of `over_parts`: the weights that are differentiated by. The others have no part in it.
        self._weights: list[Any] | None = None
        # While somebody asks what is read: the variables that were, by id.
        self._seen: dict[int, Any] | None = None

    @property
    def wide(self) -> str:
        return "float64" if jax.config.jax_enable_x64 else "float32"

    @property
    def multiplies_coarsely(self) -> bool:
        return jax.default_backend() != "cpu" and host_for_proofs() is None

    def scope(self, state: Sequence[tuple[Any, Any]] = ()) -> PendingWrites:
        if self._seen is None:
            return PendingWrites.within(state)
        scope = Reads.within(state)
        scope.seen = self._seen
        return scope

    @contextlib.contextmanager
    def changed(self, variables: Sequence[Any], change: Callable[[Any], Any]) -> Iterator[None]:
        before = [(variable, variable._value) for variable in variables]
        with taken_back(lambda: assign(before)):
            for variable, value in before:
                # On the host, where proofs run, so that nothing can be short of memory on the device.
                variable._value = jax.device_put(change(np.asarray(value)), host_for_proofs() or value.sharding)
            yield

    def call(self, x: Any, training: bool) -> Any:
        """By stateless_call, as in Keras's own step: what is written to other than non-trainable variables is lost."""
        look_at_the_clock()
        model, scope = self.model, get_stateless_scope()
        model._clear_losses()
        options = {"training": training} if model._call_has_training_arg else {}
        trainable, others = (
            [variable.value for variable in variables]
            for variables in (model.trainable_variables, model.non_trainable_variables)
        )
        with recomputing(model, self.recompute if training else (), self):
            y_pred, new, losses = model.stateless_call(trainable, others, x, return_losses=True, **options)
        for variable, before, after in zip(model.non_trainable_variables, others, new, strict=True):
            if after is not before:
                scope.add_update((variable, after))
        # Those of regularisers come last. Keras makes them anew whenever it asks a model for its losses.
        scope.losses.extend(losses[: len(losses) - len(fixed_regularisers(model))])
        return y_pred

    @staticmethod
    def flat(structure: Any) -> tuple[list[Any], Callable[[list[Any]], Any]]:
        leaves, shape = jax.tree.flatten(structure)
        return leaves, functools.partial(jax.tree.unflatten, shape)

    def recomputed(self, function: Callable[..., list[Any]], tensors: list[Any]) -> list[Any]:
        results: list[Any] = jax.checkpoint(function)(*tensors)
        return results

    @contextlib.contextmanager
    def losses_of_call(self) -> Iterator[None]:
        """As in Keras's own step, where a loss that calls the model again finds those of the first call."""
        override = self.model._losses_override
        override[:] = self.model.losses
        try:
            yield
        finally:
            override.clear()

    def run(self, compute: Compute, inputs: Sequence[Any] = ()) -> list[Any]:
        return compute(*inputs)[1]

    def differentiate(self, compute: Compute, inputs: Sequence[Any] = ()) -> tuple[list[Any], list[Any], list[Any]]:
        outer = get_stateless_scope()
        within = self._weights is not None
        variables = self.model.trainable_weights if self._weights is None else self._weights
        floating = [index for index, value in enumerate(inputs) if jnp.issubdtype(value.dtype, jnp.inexact)]
        written: list[Any] = []

        def function(values: list[Any], some: list[Any]) -> Any:
            everything = list(inputs)
            for index, value in zip(floating, some, strict=True):
                everything[index] = value
            with self.scope(list(zip(variables, values, strict=True))) as inner:
                target, results = compute(*everything)
            # Nothing that was traced in here may be seen outside but through what is returned.
            written[:] = inner.written.values()
            return target, (results, [value for _, value in inner.pending()], inner.losses)

        values, given = [variable.value for variable in variables], [inputs[i] for i in floating]
        if within:
            # Or the derivative around this one would be of it, too.
            values, given = lax.stop_gradient((values, given))
        differentiated = jax.value_and_grad(function, argnums=(0, 1), has_aux=True)
        (_, (results, pending, added)), (gradients, slopes) = differentiated(values, given)
        for update in zip(written, pending, strict=True):
            outer.add_update(update)
        outer.losses[:] = added
        by_input: list[Any] = [None] * len(inputs)
        for index, slope in zip(floating, slopes, strict=True):
            by_input[index] = slope
        return results, gradients, by_input

    def over_pieces(self, piece: Piece, batch_size: Any, count: Any, state: list[Any]) -> Outcome:
        weights = self.model.trainable_weights
        return _over_pieces(piece, batch_size, count, state, weights, overwritten(weights))

    def over_parts(self, part: Piece, size: Any, count: Any, state: list[Any]) -> Outcome:
        outer, self._weights = self._weights, []
        try:
            used = self._read_by(lambda state: part(0, 1, state), state)
            self._weights = [v for v in self.model.trainable_weights if id(v) in used]
            outcome = _over_pieces(part, size, count, state, self._weights)
        finally:
            self._weights = outer
        gradients = iter(outcome.gradients)
        if outcome.gradients:
            weights = self.model.trainable_weights
            outcome.gradients = [next(gradients) if id(v) in used else None for v in weights]
        return outcome

    def _read_by(self, function: Callable[..., Any], *arguments: Any) -> dict[int, Any]:
        """The variables whose values a function reads, by id."""
        seen: dict[int, Any] = {}
        self._seen = seen

        def look(*arguments: Any) -> None:
            function(*arguments)

        try:
            jax.eval_shape(look, *arguments)
        finally:
            self._seen = None
        return seen

    @staticmethod
    def take(data: Any, start: Any, size: Any) -> Any:
        def cut(leaf: Any) -> Any:
            if leaf is None:
                return None
            if isinstance(leaf, sparse.JAXSparse):
                begin = [jnp.asarray(index, jnp.int32) for index in [start] + [0] * (leaf.ndim - 1)]
                return sparse.bcoo_dynamic_slice(leaf, begin, (size, *leaf.shape[1:]))
            if is_on_host(leaf) and not tracing():
                # By itself JAX would move all of it to the device to cut a piece off.
                return jax.device_put(np.asarray(leaf)[start : start + size])
            if is_on_host(leaf):
                # A slice whose beginning is computed is the one that XLA moves piece by piece.
                return to_device(lax.dynamic_slice_in_dim(leaf, start, size))
            if isinstance(start, int):
                return leaf[start : start + size]
            return lax.dynamic_slice_in_dim(leaf, start, size)

        return tree.map_structure(cut, data)

    take_rows = take

    @staticmethod
    def pick(data: Any, samples: Sequence[int]) -> Any:
        def picked(leaf: Any) -> Any:
            if isinstance(leaf, sparse.JAXSparse):
                rows = [JaxEngine.take(leaf, index, 1) for index in samples]
                return sparse.bcoo_concatenate(rows, dimension=0)
            # Cut on the host: by itself JAX would compile that.
            return leaf if leaf is None else jax.device_put(np.asarray(leaf)[list(samples)])

        return tree.map_structure(picked, data)

    @staticmethod
    def size_of(leaf: Any) -> int:
        return int(leaf.shape[0])

    insist = staticmethod(insist)

    def samples_for_keras(self, x: Any) -> Any:
        return first_tensor(x).shape[0]

    def metrics_see_masks(self, training: bool) -> bool:
        # Keras loses the mask on the way out of the function it differentiates.
        return not training

    def opened(self, rows: list[Any]) -> list[Any]:
        return rows  # Every size is known while JAX traces.

    def sized(self, rows: list[Any], whole: Callable[[], list[Any]]) -> list[Any]:
        return rows

    def add(self, a: Any, b: Any) -> Any:
        if a is None or b is None:
            return b if a is None else a
        return a + b


class Reads(PendingWrites):
    """Remembers which variables are read or written."""

    def __init__(self, values: dict[int, Any]) -> None:
        super().__init__(values)
        self.seen: dict[int, Any] = {}

    def get_current_value(self, variable: Any) -> Any:
        self.seen[id(variable)] = variable
        return super().get_current_value(variable)


def tracing() -> bool:
    return bool(is_in_jax_tracing_scope())


def _over_pieces(
    piece: Piece,
    batch_size: int,
    count: int,
    state: list[Any],
    weights: Sequence[Any],
    largest: Collection[int] = (),
) -> Outcome:
    size = largest_piece(batch_size, count)
    whole, rest = divmod(batch_size, size)
    outcome = (_scanned if tracing() else _looped)(piece, whole, size, state, largest)
    if rest:
        outcome = _join(outcome, piece(whole * size, rest, outcome.state), largest)
    if outcome.gradients and weights:  # An engine for a loop that is not Keras's knows none.
        outcome.gradients = [g.astype(v.dtype) for g, v in zip(outcome.gradients, weights, strict=True)]
    return outcome


def _scanned(piece: Piece, count: int, size: int, state: list[Any], largest: Collection[int]) -> Outcome:
    """All pieces as one loop of the compiled program, which holds one of them at a time."""
    if count == 1:
        return piece(0, size, state)

    def run(start: Any, state: list[Any]) -> tuple[Any, ...]:
        outcome = piece(start, size, state)
        return outcome.state, outcome.sums, [_widened(g) for g in outcome.gradients], outcome.rows

    def body(carry: Any, index: Any) -> Any:
        state, sums, gradients = carry
        state, more_sums, more_gradients, rows = run(index * size, state)
        sums = jax.tree.map(jnp.add, sums, more_sums)
        return (state, sums, _accumulated(gradients, more_gradients, largest)), rows

    _, sums, gradients, _ = jax.eval_shape(run, jax.ShapeDtypeStruct((), jnp.int32), state)
    sums = [jnp.zeros(like.shape, like.dtype) for like in sums]
    least = [-jnp.inf if index in largest else 0 for index in range(len(gradients))]
    gradients = [jnp.full(like.shape, value, like.dtype) for like, value in zip(gradients, least, strict=True)]
    (state, sums, gradients), rows = lax.scan(body, (state, sums, gradients), jnp.arange(count, dtype=jnp.int32))
    return Outcome(state, sums, gradients, [row.reshape(-1, *row.shape[2:]) for row in rows])


def _looped(piece: Piece, count: int, size: int, state: list[Any], largest: Collection[int]) -> Outcome:
    outcome = piece(0, size, state)
    for index in range(1, count):
        outcome = _join(outcome, piece(index * size, size, outcome.state), largest)
    return outcome


def _join(first: Outcome, second: Outcome, largest: Collection[int]) -> Outcome:
    return Outcome(
        state=second.state,
        sums=[a + b for a, b in zip(first.sums, second.sums, strict=True)],
        gradients=_accumulated(first.gradients, second.gradients, largest),
        rows=[jnp.concatenate([a, b]) for a, b in zip(first.rows, second.rows, strict=True)],
    )


def _accumulated(first: list[Any], second: list[Any], largest: Collection[int]) -> list[Any]:
    pairs = enumerate(zip(first, second, strict=True))
    return [jnp.maximum(a, b) if index in largest else _widened(a) + _widened(b) for index, (a, b) in pairs]


def _widened(gradient: Any) -> Any:
    """Half precision loses the small pieces of a sum."""
    return gradient.astype(jnp.float32) if gradient.dtype.itemsize < 4 else gradient
