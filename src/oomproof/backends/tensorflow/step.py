"""The transactional step on TensorFlow: a call that raises has changed nothing."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import tree

from oomproof.backends.common.model import call, first_tensor, unpack
from oomproof.backends.common.phases import Phases
from oomproof.backends.common.step import ModelStep, batch_leaves
from oomproof.backends.tensorflow.commit import commit_leanly
from oomproof.backends.tensorflow.engine import TensorFlowEngine
from oomproof.backends.tensorflow.pieces import on_host, take
from oomproof.backends.tensorflow.writes import PendingWrites, apply_gradients, commit
from oomproof.records import Phase
from oomproof.units import tensor_bytes


class TensorFlowStep(ModelStep):
    """Runs logical batches of one compiled model, whole or in pieces.

    Programs are traced when first used and kept; the number of pieces is an input in graph mode, so that it can
    change without a new trace, and a constant under XLA, which needs to know sizes.
    """

    engine: TensorFlowEngine

    def __init__(self, model: Any) -> None:
        self._eager = bool(model.run_eagerly)
        self._xla = bool(model.jit_compile) and not self._eager
        self._programs: dict[Any, Any] = {}
        self._traced: dict[Any, Any] = {}
        self._specs: dict[str, Any] = {}
        self._pending: dict[bool, list[Any]] = {}
        super().__init__(model, TensorFlowEngine(model, static=self._xla))

    def bytes_of(self, leaf: Any) -> int:
        values = leaf.flat_values if isinstance(leaf, tf.RaggedTensor) else getattr(leaf, "values", leaf)
        return tensor_bytes(tuple(values.shape), values.dtype.name)

    def _forget_programs(self) -> None:
        self._programs.clear()
        self._traced.clear()

    def equal_pieces_only(self) -> bool:
        return self._xla

    # Running it

    def train(self, data: Any, pieces: int, lean: bool, spec: Any = None) -> Any:
        if pieces > 1:
            self._examine(data)
        in_place = _writes_cannot_wait(self.model.optimizer)
        if not lean and not in_place:
            return self._run("fused", data, pieces, spec)
        gradients, pending, logs = self._run("gradients", data, pieces, spec)
        apply = self._apply
        if in_place and not lean and not self._eager:
            # Op by op takes the least memory; what must be in place anyway runs as Keras runs it.
            apply = self._programs.setdefault("apply", tf.function(self._apply, autograph=False))
        writes = list(zip(self._pending[pieces > 1], pending, strict=True))
        commit_leanly(self.model, gradients, writes, apply)
        return logs

    def _apply(self, gradients: list[Any]) -> None:
        self.model.optimizer.apply_gradients(zip(gradients, self.model.trainable_weights, strict=True))

    def test(self, data: Any, pieces: int, spec: Any = None) -> Any:
        if pieces > 1:
            self._examine(data)
        return self._run("test", data, pieces, spec)

    def predict(self, data: Any, pieces: int, spec: Any = None) -> Any:
        if pieces == 1:
            return self._run("predict", data, 1, spec)
        size = self.batch_size(data)
        parts = []
        for index in range(pieces):
            start = index * size // pieces
            piece = take(data, start, (index + 1) * size // pieces - start)
            # Straight to the host: the predictions of the whole batch need not be on the device at once.
            parts.append(tree.map_structure(_to_host, self._run("predict", piece, 1, self._open_spec(piece))))
        return tree.map_structure(lambda *leaves: _concat(leaves), *parts)

    def probe(self, data: Any, samples: int, phase: Phase) -> None:
        few = take(data, 0, samples)
        if phase != "predict":
            self._examine(data)
        kind = {"train": "gradients", "test": "try test", "predict": "try predict"}[phase]
        self._run(kind, few, 1, self._open_spec(few), split=phase == "train")

    # Programs

    def _open_spec(self, data: Any) -> Any:
        """A spec with the batch size left open, so that pieces of all sizes share one trace; `None` if it cannot be."""
        if any(not isinstance(leaf, tf.Tensor) for leaf in batch_leaves(data)):
            return None
        spec = tree.map_structure(
            lambda leaf: None if leaf is None else tf.TensorSpec([None, *leaf.shape[1:]], leaf.dtype), data
        )
        return self._specs.setdefault(repr(spec), spec)

    def _run(self, kind: str, data: Any, pieces: int, spec: Any, split: bool = False) -> Any:
        split = split or pieces > 1
        self.engine.from_host = split and not self._xla and all(on_host(leaf) for leaf in batch_leaves(data))
        if self._eager:
            result, writes = self._compute(kind, data, pieces, split)
            commit(writes, tree.flatten(result))
            return result
        # XLA needs to know sizes: one program per number of pieces, traced for the sizes at hand.
        compiled_split = self._xla and split
        open_size = compiled_split and spec is not None and first_tensor(unpack(spec)[0]).shape[0] is None
        program = self._program(kind, split, pieces if self._xla else None, open_size)
        count = () if self._xla else (_constant(pieces),)
        if spec is None or compiled_split:
            return program(data, *count)
        # Looking a program up by its spec takes longer than a small step, so remember what was found.
        key = (program, id(spec))
        if key not in self._traced:
            self._traced[key] = (spec, program.get_concrete_function(spec, *count))
        return self._traced[key][1](data, *count)

    def _program(self, kind: str, split: bool, pieces: int | None, open_size: bool) -> Any:
        key = (kind, split, pieces, open_size, self.engine.from_host)
        if key not in self._programs:
            relaxed = not (self._xla and split)
            places: list[tuple[Any, str]] = []

            def values(data: Any, *count: Any) -> Any:
                result, writes = self._compute(kind, data, count[0] if count else pieces, split, open_size)
                places[:] = [(variable, how) for variable, how, _ in writes]
                return result, [value for *_, value in writes]

            # XLA takes over the buffers of variables that a program writes, and frees them when it runs out of memory,
            # though the variables still have them. So what it compiles writes nothing, and the writing is done around.
            compiled = tf.function(values, reduce_retracing=relaxed, jit_compile=True, autograph=False)
            compute = compiled if self._xla else values

            def step(data: Any, *count: Any) -> Any:
                result, found = compute(data, *count)
                writes = [(variable, how, value) for (variable, how), value in zip(places, found, strict=True)]
                commit(writes, tree.flatten(result))
                return result

            self._programs[key] = tf.function(step, reduce_retracing=relaxed, autograph=False)
        return self._programs[key]

    def _compute(
        self, kind: str, data: Any, pieces: Any, split: bool, open_size: bool = False
    ) -> tuple[Any, list[tuple[Any, str, Any]]]:
        """What a program returns, and what it is to write."""
        phases = Phases(self.model, self.engine, self._added_losses, open_size)
        scope: PendingWrites
        with self.engine.scope() as scope:
            training = kind in ("fused", "gradients")
            gradients: Sequence[Any] = ()
            if "predict" in kind:
                logs = call(self.model, unpack(data)[0], False)
            elif split:
                gradients, logs = phases.split(data, pieces, training)
            else:
                gradients, logs = phases.whole(data, training)
            # A metric may return its variable: what counts is the value that is pending.
            logs = tree.map_structure(lambda log: log.value if isinstance(log, keras.Variable) else log, logs)
            if kind == "fused" and gradients:
                apply_gradients(self.model.optimizer, gradients, self.model.trainable_weights, scope)
            if kind == "gradients":
                pending = scope.pending()
                self._pending[split] = [variable for variable, _ in pending]
                return (list(gradients), [value for _, value in pending], logs), []
        return logs, [] if kind.startswith("try") else scope.writes()


def _writes_cannot_wait(optimizer: Any) -> bool:
    """ScheduleFreeAdamW takes hold of a variable before it writes to it and reads it afterwards."""
    kind = getattr(keras.optimizers, "ScheduleFreeAdamW", ())
    return isinstance(getattr(optimizer, "inner_optimizer", optimizer), kind)


@functools.cache
def _constant(pieces: int) -> tf.Tensor:
    return tf.constant(pieces, tf.int64)


def _to_host(tensor: Any) -> Any:
    return tensor if isinstance(tensor, tf.RaggedTensor | tf.SparseTensor) else np.array(tensor)


def _concat(leaves: Sequence[Any]) -> Any:
    if isinstance(leaves[0], np.ndarray):
        with tf.device("CPU:0"):
            return tf.convert_to_tensor(np.concatenate(leaves, axis=0))
    if isinstance(leaves[0], tf.SparseTensor):
        return tf.sparse.concat(0, list(leaves))
    return tf.concat(list(leaves), axis=0)
