"""Labels of segments, looked up in a model."""

from __future__ import annotations

import collections
import difflib
from collections.abc import Iterator, Sequence
from typing import Any

from oomproof._backends.common.call_graph import Graph, graph_of, graphs


def labels(model: Any) -> tuple[str, ...]:
    """Labels of all calls that can be recomputed, in order. Empty for a model with code of its own.

    A nested model has its own calls in the place of its call, unless it is called more than once: its calls have one
    label for all times.
    """
    found = {graph.prefix: graph for graph in graphs(model)}

    def expanded(graph: Graph) -> Iterator[str]:
        times = collections.Counter(id(call.operation) for call in graph.calls)
        for call in graph.calls:
            inner = found.get(f"{call.path}/")
            if inner is None or times[id(call.operation)] > 1:
                yield call.label
            else:
                yield from expanded(inner)

    return tuple(expanded(found[""])) if found else ()


def resolved(model: Any, segments: Sequence[str]) -> tuple[list[tuple[Graph, list[range]]], list[Any]]:
    """Segments of graphs, as ranges of their calls, and layers all of whose calls are meant.

    Raises:
        ValueError: See `recompute.recomputing`.
    """
    paths = dict(_paths(model))
    known = list(all_graphs(model, paths))
    # The names of today stand for a label, too: they are what people write.
    places = {
        text: (graph, index)
        for which in ("name", "label")
        for graph in known
        for index, call in enumerate(graph.calls)
        for text in [getattr(call, which)]
    }
    spans: dict[int, tuple[Graph, list[range]]] = {}
    whole_layers: dict[int, Any] = {}
    for segment in segments:
        first, _, last = segment.partition("..")
        if first not in places and not last:
            layer = _layer(first, paths, places)
            if id(layer) in whole_layers:
                raise ValueError(f"Expected segments that do not overlap. Received: {segment!r} twice")
            whole_layers[id(layer)] = layer
            continue
        graph, start = _place(first, segment, places)
        end_graph, end = _place(last or first, segment, places)
        if graph.function is not end_graph.function or end < start:
            raise ValueError(
                f"Expected a segment from one call to a later one of the same model. Received: {segment!r}"
            )
        _, taken = spans.setdefault(id(graph.function), (graph, []))
        span = range(start, end + 1)
        if any(span.start < other.stop and other.start < span.stop for other in taken):
            raise ValueError(
                f"Expected segments that do not overlap. Received: {segment!r} beside {_others(segments, segment)}"
            )
        taken.append(span)
    return list(spans.values()), list(whole_layers.values())


def _others(segments: Sequence[str], segment: str) -> str:
    others = list(segments)
    others.remove(segment)
    return ", ".join(map(repr, others))


def _paths(model: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every layer in the model, by the names on the way to it."""
    for layer in model._flatten_layers(include_self=False, recursive=False):
        yield f"{prefix}{layer.name}", layer
        yield from _paths(layer, f"{prefix}{layer.name}/")


def all_graphs(model: Any, paths: dict[str, Any] | None = None) -> Iterator[Graph]:
    """All graphs in a model, also those inside of code that is none."""
    yield from graphs(model)
    for path, layer in (dict(_paths(model)) if paths is None else paths).items():
        if graph_of(layer) is not None:
            yield from graphs(layer, f"{path}/")


def _place(label: str, segment: str, places: dict[str, tuple[Graph, int]]) -> tuple[Graph, int]:
    if label not in places:
        raise ValueError(_unknown(label, places) + (f" in {segment!r}" if label != segment else ""))
    return places[label]


def _layer(label: str, paths: dict[str, Any], places: dict[str, Any]) -> Any:
    if label in paths:
        return paths[label]
    named = {id(layer): path for path, layer in paths.items() if layer.name == label}
    if len(named) > 1:
        several = ", ".join(named.values())
        raise ValueError(f"Expected the path of one layer. Received: {label!r}, which may be {several}")
    if not named:
        raise ValueError(_unknown(label, {**places, **paths}))
    return paths[next(iter(named.values()))]


def _unknown(label: str, known: Any) -> str:
    near = difflib.get_close_matches(label, list(known), 3)
    hint = f" Did you mean {' or '.join(near)}?" if near else ""
    return f"Expected the label of a call or layer of the model. Received: {label!r}.{hint}"
