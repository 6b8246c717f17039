"""Whose op is it: the layer and the part of the step, from scopes and from what an op is computed from."""

from __future__ import annotations

from oomproof._records.trace import Stage
from oomproof._simulators.tensorflow.graph import Node, StepGraph
from oomproof._simulators.tensorflow.scopes import OPTIMIZER


class Scopes:
    """Who is known to have opened the scopes of an op."""

    def __init__(self, noted: dict[str, str]) -> None:
        self._noted = noted
        self._found: dict[str, str | None] = {}

    def owner(self, name: str) -> str | None:
        """What is noted of the innermost scope that is. Gradients repeat the forward op's scopes behind their own."""
        scope = name.rpartition("/")[0]
        if scope not in self._found:
            parts = scope.split("/") if scope else []
            found, longest = None, 0
            for first in range(len(parts)):
                for last in range(len(parts), first + longest, -1):
                    owner = self._noted.get("/".join(parts[first:last]))
                    if owner is not None:
                        found, longest = owner, last - first
                        break
            self._found[scope] = found
        return self._found[scope]

    def place(self, name: str) -> tuple[Stage, str]:
        """The part of the step and the layer of an op, from nothing but its name."""
        owner = self.owner(name)
        if owner == OPTIMIZER:
            return "update", ""
        return "backward" if is_gradient(name) else "forward", owner or ""


def is_gradient(name: str) -> bool:
    return "gradient_tape/" in name or "_grad/" in name


class Owners:
    """The layer and the stage of every node of a graph.

    Args:
        graph: The graph.
        recomputes: Whether layers are computed again in the backward pass.
    """

    def __init__(self, graph: StepGraph, recomputes: bool = False) -> None:
        self._scope = Scopes(graph.scopes).owner
        self._variables = {variable.node: variable.layer for variable in graph.variables if variable.node}
        self._layers: dict[int, str] = {}
        self._stages: dict[int, Stage] = {}
        self._unscoped_users: dict[int, list[Node]] = {}
        for node in graph.nodes:
            for source, _ in node.inputs:
                if self._scope(source.name) is None:
                    self._unscoped_users.setdefault(id(source), []).append(node)
        self._after_gradients = self._reached(graph) if recomputes else set()

    def layer(self, node: Node) -> str:
        known = self._layers.get(id(node))
        if known is None:
            self._layers[id(node)] = ""  # Loops come back here.
            known = self._layers[id(node)] = self._find_layer(node)
        return known

    def stage(self, node: Node) -> Stage:
        known = self._stages.get(id(node))
        if known is None:
            self._stages[id(node)] = "forward"
            known = self._stages[id(node)] = self._find_stage(node)
        return known

    def _reached(self, graph: StepGraph) -> set[int]:
        """Nodes that wait for a gradient, by `id`. What is computed again is named as the first time, but waits."""
        users: dict[int, list[Node]] = {}
        for node in graph.nodes:
            for source in (*(source for source, _ in node.inputs), *node.controls):
                users.setdefault(id(source), []).append(node)
        # Constants are shared by whoever needs the same, and named after one of them.
        pending = [node for node in graph.nodes if is_gradient(node.name) and node.inputs]
        reached = set(map(id, pending))
        while pending:
            for user in users.get(id(pending.pop()), ()):
                if id(user) not in reached and self._scope(user.name) != OPTIMIZER:
                    reached.add(id(user))
                    pending.append(user)
        return reached

    def _find_layer(self, node: Node) -> str:
        if node.name in self._variables:
            return self._variables[node.name]
        scope = self._scope(node.name)
        if scope is not None and scope != OPTIMIZER:
            return scope
        # Losses, metrics, sums of gradients and updates are outside of all layers. They count to the one whose result,
        # gradient or weight they are given.
        return next((layer for source, _ in node.inputs if (layer := self.layer(source))), "")

    def _find_stage(self, node: Node) -> Stage:
        if self._scope(node.name) == OPTIMIZER:
            return "update"
        if is_gradient(node.name) or id(node) in self._after_gradients:
            return "backward"
        # Sums of gradients and gradients that a layer computes itself have no scope.
        if self._scope(node.name) is None and node.inputs:
            users = self._unscoped_users.get(id(node), [])
            if any(self.stage(source) == "backward" for source, _ in node.inputs) or (
                users and all(self.stage(user) == "backward" for user in users)
            ):
                return "backward"
        return "forward"
