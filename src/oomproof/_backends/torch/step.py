"""The transactional step on torch: a call that raises has changed nothing."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from typing import Any

import keras
import torch
from keras import tree

from oomproof._backends.common.draws import Draw, Rows
from oomproof._backends.common.model import caveat_of_statistics, seed_variables, unpack, written_by_update
from oomproof._backends.common.predictions import predicted
from oomproof._backends.common.proving import StepValues
from oomproof._backends.common.step import ModelStep
from oomproof._backends.torch.commit import Commit, undone
from oomproof._backends.torch.device import is_lost, says_memory
from oomproof._backends.torch.engine import TorchEngine, as_tensor, take
from oomproof._backends.torch.kernels import faster_kernels
from oomproof._backends.torch.lost_device import lost_device
from oomproof._backends.torch.tree_walks import without_cycles
from oomproof._backends.torch.writes import settled, write
from oomproof._compat.torch import NormBase, TorchDynamoException
from oomproof._records.run import Phase

logger = logging.getLogger("oomproof")


class TorchStep(ModelStep):
    """Runs logical batches of one compiled model, whole or in pieces."""

    engine: TorchEngine
    tries_are_cheap = True

    def __init__(self, model: Any) -> None:
        super().__init__(model, TorchEngine(model))
        self._commit = Commit(model)
        self._finished = 0

    def equal_pieces_only(self) -> bool:
        return False

    def evaluate(self, function: Callable[..., list[Any]], *arguments: Any) -> list[Any]:
        def evaluate() -> list[Any]:
            with self.engine.scope():
                return function(*map(_with_own_weights, arguments))

        found: list[Any] = self._run(evaluate, keep=False)
        return found

    # Running it

    def train(self, data: Any, pieces: int, lean: bool, spec: Any = None) -> Any:
        split = self.in_pieces(pieces)
        if pieces > 1:
            self._examine(data)
            self._learn_draws(data, training=True)

        def train() -> Any:
            gradients, pending, logs = self._compute(data, pieces, training=True, split=split)
            self._commit(self.model.trainable_weights, gradients, pending, lean)
            return logs

        logs = self._run(train)
        self._finished += 1
        return logs

    def test(self, data: Any, pieces: int, spec: Any = None) -> Any:
        if pieces > 1:
            self._examine(data)
            self._learn_draws(data, training=False)

        def test() -> Any:
            _, pending, logs = self._compute(data, pieces, training=False, split=pieces > 1)
            write(settled(pending))
            return logs

        return self._run(test)

    def predict(self, data: Any, pieces: int, spec: Any = None) -> Any:
        batch_size = self.batch_size(data)
        if pieces > 1:
            self._learn_draws(data, training=False)

        def predict() -> Any:
            with self.engine.scope() as scope:
                if pieces == 1:
                    outputs = self._outputs(data)
                else:
                    seeds = {id(v): v.value for v in seed_variables(self.model)}

                    def on_host(start: int, size: int) -> Any:
                        # From the seeds that the batch began with, like its pieces in training.
                        scope.state_mapping.update(seeds)
                        with self.engine.drawing(Rows(start, size, batch_size)):
                            piece = self._outputs(take(data, start, size))
                        # Straight to the host: what is predicted need not be on the device all at once.
                        return tree.map_structure(lambda leaf: leaf if leaf is None else leaf.cpu(), piece)

                    outputs = predicted(on_host, batch_size, pieces, torch.cat)
            write(settled(scope.pending()))
            return outputs

        return self._run(predict)

    def probe(self, data: Any, samples: int, phase: Phase) -> None:
        few = take(data, 0, samples)
        if phase != "predict":
            self._examine(data)
        self._learn_draws(data, training=phase == "train")

        def probe() -> None:
            if phase == "predict":
                with self.engine.scope():
                    self._outputs(few)
            else:
                self._compute(few, 1, training=phase == "train", split=phase == "train")

        self._run(probe, keep=False)

    def caveats(self) -> tuple[str, ...]:
        kinds = {type(module).__name__ for module in self.engine.outside.modules() if isinstance(module, NormBase)}
        found = tuple(caveat_of_statistics(f"torch's {kind}") for kind in sorted(kinds))
        return super().caveats() + found

    def step_values(self, data: Any, pieces: int) -> StepValues:
        """The update is made, looked at and undone: Keras's optimizers on torch write in place."""
        found: list[StepValues] = []

        def values() -> None:
            gradients, pending, logs = self._compute(data, pieces, training=True, split=self.in_pieces(pieces))
            weights = self.model.trainable_weights
            kept = [g if g is None else g.cpu().clone() for g in gradients]
            variables = [*(v for v, _ in pending), *(weights if gradients else ())]
            variables += written_by_update(self.model.optimizer) if gradients else ()
            with undone(variables):
                self._commit(weights, gradients, pending, lean=True)
                written = {id(v): (v, v._value.detach().cpu().clone()) for v in variables}
            found.append(StepValues(kept, list(written.values()), logs))

        self._run(values, keep=False)
        return found[0]

    # What it computes

    def _compute(self, data: Any, pieces: int, training: bool, split: bool) -> tuple[list[Any], list[Any], Any]:
        """(gradients, pending writes, logs) of a batch."""
        phases, data = self._phases(), _with_own_weights(data)
        with self.engine.scope() as scope:
            if split:
                gradients, logs = phases.split(data, pieces, training)
            else:
                gradients, logs = phases.whole(tree.map_structure(as_tensor, data), training)
            # A metric may return its variable: what counts is the value that is pending.
            logs = tree.map_structure(lambda log: log.value if isinstance(log, keras.Variable) else log, logs)
        return gradients, scope.pending(), logs

    def _outputs(self, data: Any) -> Any:
        x, _, _ = unpack(tree.map_structure(as_tensor, data))
        return self.engine.call(x, False)

    def _recorded_draws(self, data: Any, training: bool) -> list[Draw]:
        # What stands in for Keras's functions is not for torch.compile.
        compiled, self.engine.compiled = self.engine.compiled, False
        try:
            return super()._recorded_draws(data, training)
        finally:
            self.engine.compiled = compiled

    # How it runs

    def _run(self, function: Callable[[], Any], keep: bool = True) -> Any:
        """Runs a function such that what it changes outside of any scope is put back if it fails, or without `keep`."""
        try:
            return self._attempt(function, keep)
        except TorchDynamoException as error:
            if not self.engine.compiled or says_memory(error):
                raise
            reason = str(error).strip().splitlines()[0]
        # Nothing has changed, so it can simply be run again.
        self.engine.compiled = False
        logger.warning(f"oomproof: torch.compile cannot compile the model, which now runs without it: {reason}")
        return self._attempt(function, keep)

    def _attempt(self, function: Callable[[], Any], keep: bool) -> Any:
        try:
            with (
                torch.no_grad(),
                without_cycles(),
                self.engine.outside.unchanged_on_failure(keep),
                self.engine.drawing_row_by_row(),
                contextlib.nullcontext() if self.engine.compiled else faster_kernels(),
            ):
                return function()
        except Exception as error:
            if not is_lost(error):
                raise
            raise lost_device(self.model, self._commit.on_host, self._finished, error) from error


def _with_own_weights(data: Any) -> Any:
    """The batch with a copy of its sample weights: on torch Keras multiplies them with masks in place.

    A second attempt, and whoever made the batch, must find them as they were.
    """
    x, y, sample_weight = unpack(data)
    if sample_weight is None:
        return data
    own = tree.map_structure(lambda leaf: None if leaf is None else as_tensor(leaf).clone(), sample_weight)
    return x, y, own
