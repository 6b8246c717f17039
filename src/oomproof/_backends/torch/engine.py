"""How torch computes with a model: op by op, with gradients that pieces add up in place."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from keras import ops, tree
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from oomproof._backends.common.call_graph import graph_of
from oomproof._backends.common.drawing import RandomNumbers
from oomproof._backends.common.draws import Rows
from oomproof._backends.common.engine import Compute, Outcome, Piece
from oomproof._backends.common.head import HeadApart
from oomproof._backends.common.model import call, first_tensor, layers, overwritten, statistics_layers
from oomproof._backends.common.predictions import insist
from oomproof._backends.common.recompute import Rewiring
from oomproof._backends.torch.commit import undone
from oomproof._backends.torch.draws import TorchRandom
from oomproof._backends.torch.untracked import OutsideState
from oomproof._backends.torch.writes import Gradients, PendingWrites
from oomproof._compat.torch import (
    DROPOUT,
    DropoutNd,
    convert_to_tensor,
    get_device,
    is_traced,
    tree_flatten,
    tree_unflatten,
)


class TorchEngine(RandomNumbers, HeadApart):
    """See `common.engine.Engine`.

    Attributes:
        compiled: Whether the model is called through torch.compile. The loss and the update are not compiled.
    """

    tensor = torch.Tensor
    gone: tuple[type[Exception], ...] = ()
    recompute: tuple[str, ...] = ()

    def __init__(self, model: Any) -> None:
        super().__init__(model, TorchRandom())
        self.model = model
        self.compiled = bool(model.jit_compile)
        self.outside = OutsideState(model)
        # Not on every device is there double precision.
        self.wide = "float32" if torch.device(get_device()).type == "mps" else "float64"
        self._adding: Gradients | None = None
        self._rewirings: dict[tuple[tuple[str, ...], str | None, int], Rewiring] = {}

    @property
    def multiplies_coarsely(self) -> bool:
        return bool(torch.device(get_device()).type != "cpu")

    @contextlib.contextmanager
    def drawing(self, rows: Rows, whole: bool | None = None) -> Iterator[None]:
        with super().drawing(rows, whole):
            if self.draws_whole if whole is None else whole:
                # Unseeded layers draw from torch's own generators, which do not know where the batch began.
                self.outside.draw_again()
            yield

    def other_numbers(self) -> tuple[str, ...]:
        # torch's own layers draw past Keras's functions.
        modules = {id(m): (layer, m) for layer in layers(self.model) for m in layer.modules()}
        unseen = [owner.path or owner.name for owner, m in modules.values() if isinstance(m, DropoutNd)]
        return tuple(dict.fromkeys([*super().other_numbers(), *unseen]))

    def scope(self, state: Sequence[tuple[Any, Any]] = ()) -> PendingWrites:
        return PendingWrites.within(state)

    @contextlib.contextmanager
    def changed(self, variables: Sequence[Any], change: Callable[[Any], Any]) -> Iterator[None]:
        with undone(variables):
            for variable in variables:
                variable.assign(change(ops.convert_to_numpy(variable._value)))
            yield

    def drawing_row_by_row(self) -> AbstractContextManager[None]:
        """Where pieces draw for the whole batch, Dropout draws for the first sample first, and so on.

        torch goes by where numbers lie in memory, and a convolution leaves them elsewhere.
        """
        if not self.draws_whole or self.compiled:
            return contextlib.nullcontext()
        return DROPOUT.to(_row_by_row)

    def call(self, x: Any, training: bool) -> Any:
        with _same_numbers() if self.draws_whole else contextlib.nullcontext():
            return self._called(x, training)

    def _called(self, x: Any, training: bool) -> Any:
        segments = self.recompute if training else ()
        # torch.compile cannot follow what a segment does to Keras's scopes. And what records the statistics of a piece
        # is a new function each time, and each would be compiled.
        recorded = training and self._adding is not None and bool(statistics_layers(self.model))
        if self.compiled and not segments and not recorded and not self.cut_at:
            return _compiled_call()(self.model, x, training)
        with self.rewired(segments):
            return call(self.model, x, training)

    def rewired(self, segments: tuple[str, ...]) -> AbstractContextManager[None]:
        """While it lasts, calls of the model recompute the segments, and hold no tensor longer than they need it."""
        # A Sequential model that is built again has another graph.
        key = segments, self.cut_at, id(graph_of(self.model))
        if key not in self._rewirings:
            self._rewirings[key] = Rewiring(self.model, segments, self, every_graph=True)
        return self._rewirings[key].active()

    @staticmethod
    def flat(structure: Any) -> tuple[list[Any], Callable[[list[Any]], Any]]:
        # By torch's own means: Keras's take several times as long, and each segment needs this three times.
        # Only its shape is kept: a structure would hold its tensors, and what holds them may be part of their graph.
        leaves, shape = tree_flatten(structure)
        return leaves, lambda leaves: tree_unflatten(leaves, shape)

    def recomputed(self, function: Callable[..., list[Any]], tensors: list[Any]) -> list[Any]:
        def contexts() -> tuple[Any, Any]:
            return contextlib.nullcontext(), _computed_again(self.outside.modules())

        # In a trace nothing is drawn, and torch looks for random states on devices that its tensors are not on.
        traced = is_traced(tensors)
        # It would stop early by raising an error through Keras, which makes other errors of those that pass.
        with set_checkpoint_early_stop(False):
            results: list[Any] = checkpoint(
                function, *tensors, use_reentrant=False, context_fn=contexts, preserve_rng_state=not traced
            )
        return results

    def losses_of_call(self) -> AbstractContextManager[None]:
        return contextlib.nullcontext()

    def run(self, compute: Compute, inputs: Sequence[Any] = ()) -> list[Any]:
        with torch.no_grad():
            return _detached(compute(*inputs)[1])

    def differentiate(self, compute: Compute, inputs: Sequence[Any] = ()) -> tuple[list[Any], list[Any], list[Any]]:
        if self._adding is not None and inputs:
            results, slopes = self._adding.add_part(compute, inputs)
            return _detached(results), [], slopes
        if self._adding is not None:
            return _detached(self._adding.add(compute)), [], []
        weights = self.weights()
        leaves = [value.detach().requires_grad_(value.is_floating_point()) for value in inputs]
        gradients = Gradients([*weights, *leaves])
        results = _detached(gradients.add(lambda: compute(*leaves)))
        found = gradients.taken()
        return results, found[: len(weights)], found[len(weights) :]

    def over_pieces(self, piece: Piece, batch_size: Any, count: Any, state: list[Any]) -> Outcome:
        self._adding = Gradients(self.weights(), overwritten(self.model.trainable_weights))
        try:
            with self.outside.one_pass() as averages:

                def averaged(start: int, size: int, state: list[Any]) -> Outcome:
                    with averages.piece(size / batch_size):
                        return piece(start, size, state)

                outcome = _in_turn(averaged, batch_size, count, state)
            outcome.gradients = self._adding.taken()
            return outcome
        finally:
            self._adding = None

    def over_parts(self, part: Piece, size: int, count: int, state: list[Any]) -> Outcome:
        with torch.no_grad():
            return _in_turn(part, size, count, state)

    def take(self, data: Any, start: int, size: int) -> Any:
        return take(data, start, size)

    take_rows = take

    def pick(self, data: Any, samples: Sequence[int]) -> Any:
        return tree.map_structure(lambda leaf: leaf if leaf is None else leaf[list(samples)], data)

    def size_of(self, leaf: Any) -> int:
        return size_of(leaf)

    insist = staticmethod(insist)

    def samples_for_keras(self, x: Any) -> Any:
        return first_tensor(x).shape[0]

    def metrics_see_masks(self, training: bool) -> bool:
        return True

    def opened(self, rows: list[Any]) -> list[Any]:
        return rows

    def sized(self, rows: list[Any], whole: Callable[[], list[Any]]) -> list[Any]:
        return rows

    def add(self, a: Any, b: Any) -> Any:
        if a is None or b is None:
            return b if a is None else a
        return a.add_(b)

    def weights(self) -> list[Any]:
        return [variable._value for variable in self.model.trainable_weights]


def _in_turn(piece: Piece, batch_size: int, count: int, state: list[Any]) -> Outcome:
    """What all pieces hand on, but for gradients."""
    sums: list[Any] = []
    rows: list[list[Any]] = []
    for index in range(count):
        start = index * batch_size // count
        outcome = piece(start, (index + 1) * batch_size // count - start, state)
        state = outcome.state
        sums = [a + b for a, b in zip(sums, outcome.sums, strict=True)] if index else outcome.sums
        rows = rows or [[] for _ in outcome.rows]
        for parts, part in zip(rows, outcome.rows, strict=True):
            parts.append(part)
    return Outcome(state, sums, [], [_joined(parts) for parts in rows])


@functools.cache
def _compiled_call() -> Callable[..., Any]:
    # With the random numbers of ops that are not compiled: a program with a backward pass and one without it must
    # draw the same ones.
    compiled: Callable[..., Any] = torch.compile(call, options={"fallback_random": True})
    return compiled


@contextlib.contextmanager
def _computed_again(modules: Sequence[Any]) -> Iterator[None]:
    """Around what runs a second time: torch's own layers keep statistics in buffers, and write them in place."""
    buffers = [buffer for module in modules for buffer in module._buffers.values() if buffer is not None]
    before = [buffer.clone() for buffer in buffers]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, old in zip(buffers, before, strict=True):
                buffer.copy_(old)


def size_of(leaf: Any) -> int:
    return int(leaf.shape[0])


def take(data: Any, start: int, size: int) -> Any:
    """Samples `start` to `start + size` of every tensor of the batch. What is not a tensor yet becomes one."""
    return tree.map_structure(lambda leaf: leaf if leaf is None else as_tensor(leaf[start : start + size]), data)


def as_tensor(leaf: Any) -> Any:
    """Data as Keras's own step takes it: tensors stay where they are, arrays go to the device."""
    return leaf if leaf is None or isinstance(leaf, torch.Tensor) else convert_to_tensor(leaf)


def _detached(results: list[Any]) -> list[Any]:
    return [result.detach() for result in results]


def _joined(parts: list[Any]) -> Any:
    joined = torch.cat(parts)
    parts.clear()
    return joined


@contextlib.contextmanager
def _same_numbers() -> Iterator[None]:
    """Inside, torch's own generator starts from the same state each time; afterwards it is where it was.

    Keras takes from it what a Dropout without a seed draws.
    """
    with torch.random.fork_rng(devices=[torch.cuda.current_device()] if torch.cuda.is_available() else []):
        torch.manual_seed(0)
        yield


def _row_by_row(plain: Callable[..., Any], input: Any, *args: Any, **kwargs: Any) -> Any:
    return plain(input.contiguous(), *args, **kwargs)
