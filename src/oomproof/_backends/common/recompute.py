"""Segments of a built model computed again in the backward pass, instead of being kept from the forward pass.

A segment runs as a function of nothing but tensors: its inputs and their masks, and the values of the variables that
layers write (statistics, random seeds). It writes nothing. What it would have written, the losses that its layers add,
and the masks of its results come out as tensors, so it can run twice and counts once. Everything else stays Keras's:
for the time of a call, models and layers find another function where they look for their own.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import keras
from keras import ops, tree

from oomproof._backends.common.call_graph import Call, Graph, graphs
from oomproof._backends.common.engine import Engine
from oomproof._backends.common.model import layers
from oomproof._backends.common.segments import all_graphs, resolved
from oomproof._compat.keras import get_keras_mask, get_stateless_scope, global_state, set_keras_mask

# Set while a segment runs: what it holds is computed again with it, and not once more by itself.
_INSIDE = "oomproof_inside_segment"


class Recomputing(Engine, Protocol):
    """An engine that can compute a part of its model again.

    Attributes:
        model: The model.
        tensor: What tensors are, all but sparse and ragged ones.
        recompute: Segments that `call` computes again in the backward pass while training.
        head: Label of the first call of the head, and into how many parts it is cut; `None` runs it with the rest.
        cut_at: The label, while a call ends before the head.
        rest: What such a call leaves to be done.
    """

    model: Any
    tensor: type
    recompute: tuple[str, ...]
    head: tuple[str, int] | None
    cut_at: str | None
    rest: Rest | None

    def flat(self, structure: Any) -> tuple[list[Any], Callable[[list[Any]], Any]]:
        """The leaves of a structure, sparse and ragged tensors taken apart, and what puts leaves together again."""

    def recomputed(self, function: Callable[..., list[Any]], tensors: list[Any]) -> list[Any]:
        """`function(*tensors)`, which returns tensors and writes nothing, computed again when it is differentiated."""


def recomputing(model: Any, segments: Sequence[str], engine: Recomputing) -> contextlib.AbstractContextManager[None]:
    """While it lasts, calls of the model compute the segments again when they are differentiated.

    Args:
        model: A built model.
        segments: Labels as in `call_graph`; for code that is no graph, the path or the name of a layer, which means
            all of its calls.
        engine: How the framework computes. Where it has a `cut_at`, calls of the model end there.

    Raises:
        ValueError: A label is unknown, or two do not follow each other, or segments overlap.
    """
    return Rewiring(model, segments, engine).active()


class Rewiring:
    """What models and layers find in the place of their own functions. Made once, and active for the time of a call.

    Args:
        model: As for `recomputing`.
        segments: Likewise.
        engine: Likewise.
        every_graph: Also run graphs in which nothing is recomputed. Keras holds every tensor of a graph until its call
            is over; here each is let go of after its last use. Where ops run one by one, that is much memory.
    """

    def __init__(self, model: Any, segments: Sequence[str], engine: Recomputing, *, every_graph: bool = False) -> None:
        in_graphs, whole_layers = resolved(model, segments)
        outermost = next(iter(graphs(model))) if engine.cut_at else None
        cut = outermost and outermost.function
        if outermost and all(graph.function is not cut for graph, _ in in_graphs):
            in_graphs += [(outermost, [])]
        if every_graph:
            known = {id(graph.function) for graph, _ in in_graphs}
            in_graphs += [(graph, []) for graph in all_graphs(model) if id(graph.function) not in known]
        self._replaced = [
            (graph.function, "_run_through_graph", _runner(engine, graph, spans, graph.function is cut))
            for graph, spans in in_graphs
        ]
        self._replaced += [(layer, "call", _caller(engine, layer)) for layer in whole_layers]

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        # Past all attribute tracking, of Keras as of the frameworks: none of this is part of the model.
        before = [vars(owner).get(name) for owner, name, _ in self._replaced]
        try:
            for owner, name, function in self._replaced:
                vars(owner)[name] = function
            yield
        finally:
            for (owner, name, _), old in zip(self._replaced, before, strict=True):
                vars(owner).pop(name, None)
                if old is not None:
                    vars(owner)[name] = old


@dataclasses.dataclass(frozen=True)
class _Part:
    """Calls that follow each other, with ids of the symbolic tensors they need from before and give to what comes.

    Attributes:
        calls: Each with the tensors that nobody needs after it.
    """

    calls: tuple[tuple[Call, tuple[int, ...]], ...]
    needs: tuple[int, ...]
    gives: tuple[int, ...]
    recomputed: bool


def _parts(graph: Graph, spans: Sequence[range]) -> Iterator[_Part]:
    used_at: dict[int, int] = {}
    for index, call in enumerate(graph.calls):
        used_at.update(dict.fromkeys(call.outputs, index))
        used_at.update(dict.fromkeys(call.inputs, index))
    used_at.update((id(tensor), len(graph.calls)) for tensor in graph.function.outputs)
    over: dict[int, list[int]] = {}
    for key, index in used_at.items():
        over.setdefault(index, []).append(key)
    starts = {span.start: span for span in spans}
    index = 0
    while index < len(graph.calls):
        span = starts.get(index, range(index, index + 1))
        calls = graph.calls[span.start : span.stop]
        made = dict.fromkeys(key for call in calls for key in call.outputs)
        needs = dict.fromkeys(key for call in calls for key in call.inputs if key not in made)
        gives = tuple(key for key in made if used_at[key] >= span.stop)
        each = tuple((call, tuple(over.get(at, ()))) for at, call in zip(span, calls, strict=True))
        yield _Part(each, tuple(needs), gives, index in starts)
        index = span.stop


def _runner(engine: Recomputing, graph: Graph, spans: Sequence[range], cut: bool) -> Callable[..., Any]:
    """`Function._run_through_graph`, with segments; with `cut`, as far as the head."""
    function, plain = graph.function, graph.function._run_through_graph
    parts = list(_parts(graph, spans))
    body, head = parts, list[_Part]()
    if cut:
        at = next(
            at for at, part in enumerate(parts) if engine.cut_at in (part.calls[0][0].label, part.calls[0][0].name)
        )
        body, head = parts[:at], parts[at:]

    def run_through_graph(inputs: Any, operation_fn: Any = lambda operation: operation, **options: Any) -> Any:
        flat = tree.flatten(inputs)
        if options or any(isinstance(leaf, keras.KerasTensor) for leaf in flat):
            return plain(inputs, operation_fn, **options)
        values = {id(symbol): value for symbol, value in zip(function.inputs, flat, strict=True)}
        del flat, inputs
        inside = _inside()
        for part in body:
            if part.recomputed and not inside:
                _run_again_later(engine, part, values, operation_fn)
            else:
                _run(part, values, operation_fn)
        if cut:
            engine.rest = Rest(engine, function, head, values, operation_fn)
            return list(values.values())
        outputs = [values[id(symbol)] for symbol in function.outputs]
        return tree.pack_sequence_as(function._outputs_struct, outputs)

    return run_through_graph


class Rest:
    """What is left to be done of a call that ended before the head of the model."""

    def __init__(
        self, engine: Recomputing, function: Any, head: Sequence[_Part], values: dict[int, Any], operation_fn: Any
    ) -> None:
        self._function, self._head, self._operation_fn = function, head, operation_fn
        wanted = dict.fromkeys([*(key for part in head for key in part.needs), *map(id, function.outputs)])
        self._keys = [key for key in wanted if key in values]
        self._bundle = Bundle(engine, [values[key] for key in self._keys])
        # Such as the precision that the model has operations compute in.
        self._around = _Surroundings()
        with self._around():
            pass  # Now it knows how things are inside of the call.

    def tensors(self) -> list[Any]:
        """What the head needs of what was computed: a row for each sample. It is not held here any longer."""
        return self._bundle.let_go()

    def __call__(self, tensors: Sequence[Any]) -> Any:
        """Predictions for rows of these tensors."""
        values = dict(zip(self._keys, self._bundle.filled(tensors), strict=True))
        with self._around():
            for part in self._head:
                _run(part, values, self._operation_fn)
        outputs = [values[id(symbol)] for symbol in self._function.outputs]
        packed = tree.pack_sequence_as(self._function._outputs_struct, outputs)
        # As Keras does it.
        return packed[0] if isinstance(packed, list | tuple) and len(packed) == 1 else packed


def _run(part: _Part, values: dict[int, Any], operation_fn: Any) -> None:
    for call, over in part.calls:
        # Keras leaves out what cannot be computed.
        if all(key in values for key in call.inputs):
            args, kwargs = call.node.arguments.fill_in(values)
            outputs = operation_fn(call.operation)(*args, **kwargs)
            values.update(zip(call.outputs, tree.flatten(outputs), strict=False))
            del args, kwargs, outputs
        for key in over:
            values.pop(key, None)


def _run_again_later(engine: Recomputing, part: _Part, values: dict[int, Any], operation_fn: Any) -> None:
    needs = [key for key in part.needs if key in values]

    def body(given: list[Any]) -> list[Any]:
        known = dict(zip(needs, given, strict=True))
        _run(part, known, operation_fn)
        return [known.get(key) for key in part.gives]

    given = [values[key] for key in needs]
    for _, over in part.calls:
        for key in over:
            values.pop(key, None)
    results = _recomputed(engine, [call.operation for call, _ in part.calls], body, given)
    values.update({key: value for key, value in zip(part.gives, results, strict=True) if value is not None})


def _caller(engine: Recomputing, layer: Any) -> Callable[..., Any]:
    """`Layer.call`, as one segment."""
    plain = layer.call

    def call(*args: Any, **kwargs: Any) -> Any:
        if _inside() or any(isinstance(leaf, keras.KerasTensor) for leaf in tree.flatten((args, kwargs))):
            return plain(*args, **kwargs)
        return _recomputed(engine, [layer], lambda given: plain(*given[0], **given[1]), (args, kwargs))

    return call


def _recomputed(engine: Recomputing, operations: list[Any], body: Callable[[Any], Any], arguments: Any) -> Any:
    """`body(arguments)`, computed again when it is differentiated."""
    inner = [layer for operation in operations if isinstance(operation, keras.Layer) for layer in layers(operation)]
    outer = get_stateless_scope()
    values = {} if outer is None else dict(outer.state_mapping)
    # Weights are read where they are, unless a newer value waits. What layers write is taken as it is now.
    written = [v for layer in inner for v in [*layer._non_trainable_variables, *_seeds(layer)]]
    renewed = [v for layer in inner for v in layer._trainable_variables if id(v) in getattr(outer, "written", ())]
    state = {id(v): v for v in [*written, *renewed] if v._value is not None}
    # Without a scope a variable may be written in place.
    current = [ops.copy(v._value) if outer is None else values.get(key, v._value) for key, v in state.items()]
    given = Bundle(engine, (arguments, current))
    around, recorders = _Surroundings(), _Recorders(inner)
    first: dict[str, Any] = {}

    def function(*tensors: Any) -> list[Any]:
        arguments, current = given.filled(tensors)
        with around(), recorders() as moments, engine.scope() as scope:
            scope.state_mapping = values | dict(zip(state, current, strict=True))
            results = body(arguments)
        pending = scope.pending()
        made = Bundle(engine, (results, [value for _, value in pending], scope.losses, [sums for _, sums in moments]))
        adders = [_forget_loss(engine.model, loss) for loss in scope.losses]
        if not first:
            normalising = [layer for layer, _ in moments]
            first.update(made=made, written=[v for v, _ in pending], adders=adders, normalising=normalising)
        return made.let_go()

    tensors = engine.recomputed(function, given.let_go())
    results, new, added, sums = first["made"].filled(tensors)
    for variable, value in zip(first["written"], new, strict=True):
        variable.assign(value)
    for adding, loss in zip(first["adders"], added, strict=True):
        _add_loss(adding, loss)
    recorders.add(list(zip(first["normalising"], sums, strict=True)))
    return results


def _seeds(layer: Any) -> list[Any]:
    return [generator.state for generator in layer._seed_generators]


def _forget_loss(model: Any, loss: Any) -> list[Any]:
    """The layers that added a loss, by the identity of its tensor. They no longer know it afterwards."""
    adding = [layer for layer in layers(model) if id(loss) in layer._loss_ids]
    for layer in adding:
        layer._loss_ids.discard(id(loss))
    return adding


def _add_loss(adding: list[Any], loss: Any) -> None:
    scope = get_stateless_scope()
    if scope is None:
        for layer in adding:
            layer._losses.append(loss)
    elif scope.collect_losses:
        scope.add_loss(loss)
        for layer in adding:
            layer._loss_ids.add(id(loss))


class Bundle:
    """The tensors of a structure and their masks as a flat list, and the structure again from such a list."""

    def __init__(self, engine: Recomputing, structure: Any) -> None:
        leaves, self._pack = engine.flat(structure)
        masks = [get_keras_mask(leaf) if isinstance(leaf, engine.tensor) else None for leaf in leaves]
        self._rest = [*leaves, *masks]
        self._at = [index for index, leaf in enumerate(self._rest) if isinstance(leaf, engine.tensor)]
        self._tensors = [self._rest[index] for index in self._at]
        for index in self._at:
            self._rest[index] = None

    def let_go(self) -> list[Any]:
        """The tensors, which are not held here any longer: they may be large."""
        tensors, self._tensors = self._tensors, []
        return tensors

    def filled(self, tensors: Sequence[Any]) -> Any:
        leaves = list(self._rest)
        for index, tensor in zip(self._at, tensors, strict=True):
            leaves[index] = tensor
        count = len(leaves) // 2
        for leaf, mask in zip(leaves[:count], leaves[count:], strict=True):
            if mask is not None:
                set_keras_mask(leaf, mask)
        return self._pack(leaves[:count])


class _Surroundings:
    """What Keras keeps for each thread, the same each time: whether it trains, precision, device, scopes.

    A backward pass comes when all of that is over, and on GPUs torch runs it in another thread.
    """

    def __init__(self) -> None:
        self._kept: dict[str, Any] = {}

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        here = vars(global_state.GLOBAL_STATE_TRACKER)
        new = self._kept | {_INSIDE: True}
        old = {name: here[name] for name in new if name in here}
        here.update(new)
        try:
            yield
            # Taken afterwards: what was made when it was first needed, such as a random generator, is to be found.
            # Not the scope: a segment has its own, and that one would hold the losses of the model, and so their graph.
            kept = {name: value for name, value in here.items() if name != "stateless_scope"}
            self._kept = {name: list(value) if isinstance(value, list) else value for name, value in kept.items()}
        finally:
            for name in new:
                here.pop(name, None)
            here.update(old)


def _inside() -> bool:
    return bool(global_state.get_global_attribute(_INSIDE, False))


class _Recorders:
    """What `statistics.recorded` collects in a segment, taken out of its list and put back as what comes out."""

    def __init__(self, inner: list[Any]) -> None:
        self._functions = {id(layer): (layer, vars(layer)["_moments"]) for layer in inner if "_moments" in vars(layer)}
        self._seen: list[Any] = []
        for _, function in self._functions.values():
            self._seen = function.seen

    @contextlib.contextmanager
    def __call__(self) -> Iterator[list[Any]]:
        moments: list[Any] = []
        before, count = [(layer, vars(layer).get("_moments")) for layer, _ in self._functions.values()], len(self._seen)
        try:
            for layer, function in self._functions.values():
                vars(layer)["_moments"] = function
            yield moments
        finally:
            moments += self._seen[count:]
            del self._seen[count:]
            for layer, function in before:
                vars(layer).pop("_moments", None)
                if function is not None:
                    vars(layer)["_moments"] = function

    def add(self, moments: list[Any]) -> None:
        self._seen += moments
