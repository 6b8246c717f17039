"""The head of a model, its loss and its metrics computed a few samples at a time, behind a body that runs whole.

The logits of a language model may take more than everything else. Here no more than those of one part are ever there:
what a part adds to the loss is differentiated at once, by the weights of the head and by what the body has made. Then
the body goes back once. Nothing is computed twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
from keras import ops, tree

from oomproof._backends.common.call_graph import Call, Graph, graphs
from oomproof._backends.common.computing import Computing, floating, share_of, total
from oomproof._backends.common.engine import Outcome
from oomproof._backends.common.gathering import dot
from oomproof._backends.common.model import (
    has_fixed_batch,
    layers,
    losses_stream,
    metrics_stream,
    overwritten,
    will_stream,
)
from oomproof._backends.common.recompute import Rest
from oomproof._backends.common.streaming import Streaming
from oomproof._compat.keras import get_stateless_scope
from oomproof._compat.names import is_kerass
from oomproof.errors import UnsupportedModelError

# Numbers that no size is by chance.
_SOME, _LENGTH = 1009, 31


class HeadApart:
    """What an engine needs to compute the head of its model apart from the rest."""

    model: Any
    recompute: tuple[str, ...]
    _checked: tuple[str, int] | None = None
    head: tuple[str, int] | None = None
    cut_at: str | None = None
    rest: Rest | None = None

    def until_head(self, x: Any) -> Rest:
        """Calls the model as far as its head, while training."""
        assert self.head is not None
        if self._checked != self.head:
            # The model may not have been built when it was set.
            check_head(self.model, self.head, self.recompute)
            self._checked = self.head
        self.cut_at, self.rest = self.head[0], None
        try:
            self.call(x, True)  # type: ignore[attr-defined]
            found = self.rest
        finally:
            # What failed is not to hold what the body has made.
            self.cut_at = self.rest = None
        if found is None:
            raise UnsupportedModelError(
                f"The model does not run its calls one by one, so its head ({self.head[0]}) cannot run in parts. Train "
                'it without: leave "head" out of `allow`.'
            )
        return found


def heads(model: Any) -> tuple[str, ...]:
    """Labels of the calls that a head can begin with, the earliest first.

    None for a model with code of its own, or whose outputs are a number for each sample.
    """
    return tuple(call.label for call in _firsts(model))


def check_head(model: Any, head: tuple[str, int], recompute: Sequence[str]) -> None:
    """Raises ValueError where the head cannot begin there, or is recomputed."""
    label, parts = head
    possible = _firsts(model)
    if not possible:
        raise ValueError(
            f"Expected no `head`: no part of this model can be computed apart from the rest. Received: head={label!r}"
        )
    if all(label not in (call.label, call.name) for call in possible):
        known = ", ".join(repr(call.label) for call in possible)
        raise ValueError(f"Expected `head` to be one of {known}. Received: head={label!r}")
    if parts < 2:
        raise ValueError(f"Expected `head_parts` to be 2 or more. Received: head_parts={parts}")
    calls = next(iter(graphs(model))).calls
    first = next(index for index, call in enumerate(calls) if label in (call.label, call.name))
    for segment in recompute:
        last = segment.rpartition("..")[2]
        if any(last in (call.label, call.name) or last.startswith(f"{call.path}/") for call in calls[first:]):
            raise ValueError(f"Expected nothing of the head to be recomputed. Received: head={label!r} and {segment!r}")


def gains(model: Any) -> bool:
    """Whether no more than a part's predictions are needed at a time: not where a loss or metric wants all of them."""
    return (losses_stream(model) or will_stream(model)) and metrics_stream(model)


def _firsts(model: Any) -> list[Call]:
    """The calls that a head can begin with, the earliest first."""
    graph = next(iter(graphs(model)), None)
    if graph is None or model.activity_regularizer is not None or has_fixed_batch(model):
        return []
    if any(len(tensor.shape) < 2 for tensor in graph.function.outputs):
        return []
    found: list[Call] = []
    by_sample = _by_sample(graph)
    # From the last on, as long as each may be a part of it. The first of all would leave no body.
    for index in range(len(graph.calls) - 1, 0, -1):
        if not _may_be_in_head(graph.calls[index]):
            break
        if all(id(tensor) in by_sample for tensor in _crossing(graph, index)):
            found.insert(0, graph.calls[index])
    return found


def _may_be_in_head(call: Call) -> bool:
    """Whether a call writes nothing, draws nothing and adds no loss. Whether it mixes samples, the proof finds out."""
    operation = call.operation
    if not isinstance(operation, keras.Layer):
        return True
    return not any(
        layer._non_trainable_variables
        or layer._seed_generators
        or layer.activity_regularizer is not None
        or overwritten(layer._trainable_variables)
        # It may draw numbers, and keep statistics, in torch's own way.
        or isinstance(layer, keras.layers.TorchModuleWrapper)
        or _adds_losses(layer)
        for layer in layers(operation)
    )


def _adds_losses(layer: Any) -> bool:
    """Whether the code of a user's layer says so."""
    code = getattr(type(layer).call, "__code__", None)
    return not is_kerass(type(layer)) and "add_loss" in getattr(code, "co_names", ())


def _crossing(graph: Graph, index: int) -> list[Any]:
    """Symbolic tensors that calls from there on need, or that are returned, and that were there before."""
    after = graph.calls[index:]
    made = {key for call in after for key in call.outputs}
    needed = [tensor for call in after for tensor in call.node.input_tensors]
    return [tensor for tensor in (*needed, *graph.function.outputs) if id(tensor) not in made]


def _by_sample(graph: Graph) -> set[int]:
    """Ids of the symbolic tensors that have a row for each sample, by what calls say of some number of samples.

    That a size is left open does not tell: it may be that of all positions of all samples.
    """
    known: dict[int, Any] = {}
    for tensor in graph.function.inputs:
        sizes = [_LENGTH if size is None else size for size in tensor.shape[1:]]
        shape = (_SOME, *sizes) if len(tensor.shape) else ()
        known[id(tensor)] = keras.KerasTensor(shape, tensor.dtype, sparse=tensor.sparse)
    for call in graph.calls:
        try:
            outputs = _outputs_of(call, known)
        except Exception:  # Whatever a layer says to other sizes: nothing is known of what it makes.
            continue
        known.update(zip(call.outputs, outputs, strict=False))
    return {key for key, tensor in known.items() if tuple(tensor.shape[:1]) == (_SOME,) and not tensor.sparse}


def _outputs_of(call: Call, known: dict[int, Any]) -> list[Any]:
    given, made = [known[key] for key in call.inputs], call.node.outputs
    plain = isinstance(call.operation, keras.Layer) and is_kerass(type(call.operation))
    plain = plain and not isinstance(call.operation, keras.layers.Lambda)
    if plain and all(None not in tensor.shape[1:] for tensor in made):
        # Keras's layers leave the first axis as it is: no need to ask.
        rows = given[0].shape[:1] if given else ()
        return [keras.KerasTensor((*rows, *tensor.shape[1:]), tensor.dtype, sparse=tensor.sparse) for tensor in made]
    args, kwargs = call.node.arguments.fill_in(known)
    return list(tree.flatten(call.operation.compute_output_spec(*args, **kwargs)))


class HeadInParts(Streaming):
    """A batch, in pieces or not, each of which computes the head of the model in parts."""

    def __init__(self, computing: Computing, data: Any, count: Any, training: bool) -> None:
        super().__init__(computing, data, count, training)
        # What a batch that is not cut adds to its loss need not be known before.
        self._cut = not (isinstance(count, int) and count == 1)

    def _normalisers(self, start: Any, size: Any, state: list[Any]) -> Outcome:
        x, y, sample_weight = self.take(start, size)

        def compute() -> tuple[Any, list[Any]]:
            rest = self.engine.until_head(x)
            tensors = self._rows_of(rest, size)

            def part(start: Any, size: Any, state: list[Any]) -> Outcome:
                given, (targets, weights) = self._part_of(tensors, (y, sample_weight), start, size)
                with self.engine.scope(self.writes.for_piece(state)):
                    sums = self.normalisers_of(targets, rest(given), weights, size)
                return Outcome(state=state, sums=sums)

            return None, self.engine.over_parts(part, size, self._parts(size), state).sums

        with self.piece(start, size, state) as scope:
            sums = self.engine.run(compute)
        return Outcome(state=self.writes.state_in(scope), sums=sums)

    def _piece(self, start: Any, size: Any, state: list[Any]) -> Outcome:
        x, y, sample_weight = self.take(start, size)
        share = share_of(size, self.size)
        positions: list[int] = []

        def compute() -> tuple[Any, list[Any]]:
            with self.writes.recorded() as moments:
                rest = self.engine.until_head(x)
            added = self._added_by_body(share)
            tensors = self._rows_of(rest, size)
            outcome, slopes = self._over_parts(rest, tensors, (y, sample_weight), size, state)
            positions[:] = [at for at, gradient in enumerate(outcome.gradients) if gradient is not None]
            compiled, *terms = outcome.sums
            sums = [compiled, *added, *terms, *moments]
            # Its derivative by each tensor is that tensor's slope. What it is by itself is of no use.
            targets = [dot(tensors, slopes)] if any(slope is not None for slope in slopes) else []
            targets += [self.computing.scaled(total(added, added[0].dtype))] if added else []
            target = total(targets, targets[0].dtype) if targets else ops.zeros(())
            return target, [*outcome.state, *(outcome.gradients[at] for at in positions), *sums]

        with self.piece(start, size, state) as scope:
            results, gradients, _ = self.computing.run(compute, True)
        done, results = results[: len(state)], results[len(state) :]
        by_head: list[Any] = [None] * len(gradients)
        for at in positions:
            by_head[at] = results.pop(0)
        seeds = self.writes.seeds
        return Outcome(
            state=[*self.writes.state_in(scope)[:seeds], *done[seeds:]],
            sums=[*results, *self.writes.averages_in(scope, share)],
            gradients=self.computing.together(gradients, by_head),
        )

    def _over_parts(
        self, rest: Rest, tensors: list[Any], given: tuple[Any, Any], size: Any, state: list[Any]
    ) -> tuple[Outcome, list[Any]]:
        """What all parts hand on, and the slopes of the loss by what the head is given."""
        steep: list[int] = []

        def part(start: Any, size: Any, state: list[Any]) -> Outcome:
            rows, (y, sample_weight) = self._part_of(tensors, given, start, size)

            def compute(*rows: Any) -> tuple[Any, list[Any]]:
                y_pred = rest(rows)
                compiled, terms = self.shares(y, y_pred, sample_weight, size)
                if get_stateless_scope().losses:
                    raise self._adds_a_loss()
                return self.computing.scaled(compiled), [*self.predictions.flat(y_pred), compiled, *terms]

            with self.engine.scope(self.writes.for_piece(state)) as scope:
                results, gradients, slopes = self.computing.run(compute, True, rows)
                count = self.predictions.count
                self.update_metrics(y, results[:count], sample_weight)
                after = self.writes.state_in(scope)
            steep[:] = [at for at, slope in enumerate(slopes) if slope is not None]
            return Outcome(after, results[count:], gradients, [slopes[at] for at in steep])

        outcome = self.engine.over_parts(part, size, self._parts(size), state)
        slopes: list[Any] = [None] * len(tensors)
        for at, slope in zip(steep, outcome.rows, strict=True):
            slopes[at] = slope
        return outcome, slopes

    def _added_by_body(self, share: Any) -> list[Any]:
        losses = get_stateless_scope().losses
        if self._cut:
            if len(losses) < len(self.computing.added_losses[True]):
                raise self._adds_a_loss()
            return self.computing.added(share, True)
        self.added = len(losses)
        return [ops.sum(floating(value)) for value in losses]

    def _adds_a_loss(self) -> ValueError:
        assert self.engine.head is not None
        return ValueError(
            "Expected a head none of whose layers adds a loss: it would count once for each part. "
            f"Received: head={self.engine.head[0]!r}. Begin it behind that layer."
        )

    def _rows_of(self, rest: Rest, size: Any) -> list[Any]:
        """What the head is given, if that has a row for each sample."""
        assert self.engine.head is not None
        tensors = rest.tensors()
        for tensor in tensors:
            rows = self.engine.size_of(tensor) if len(tensor.shape) else 0
            text = f"Expected a head that is given a row for each sample. Received: head={self.engine.head[0]!r}"
            if isinstance(rows, int) and isinstance(size, int) and rows != size:
                raise ValueError(f"{text}, which is given {rows} rows for {size} samples")
            self.engine.insist(rows, size, text)
        return tensors

    def _part_of(self, tensors: list[Any], given: Any, start: Any, size: Any) -> tuple[list[Any], Any]:
        return self.engine.take_rows(tensors, start, size), self.engine.take(given, start, size)

    def _parts(self, size: Any) -> Any:
        """Into how many parts the head of so many samples is cut."""
        assert self.engine.head is not None
        parts = self.engine.head[1]
        if self.engine.draws_whole and isinstance(size, int):
            # For a proof: parts of one size do not show whether each has the right share.
            parts = max(2, (size + 1) // 2)
        return min(parts, size) if isinstance(size, int) else parts
