"""The transactional step on TensorFlow: a call that raises has changed nothing."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import keras
import tensorflow as tf
from keras import tree

from oomproof._backends.common.batch import batch_leaves
from oomproof._backends.common.draws import Draw, Rows
from oomproof._backends.common.model import call, first_tensor, may_be_sparse, unpack
from oomproof._backends.common.phases import Phases
from oomproof._backends.common.predictions import predicted
from oomproof._backends.common.proving import StepValues
from oomproof._backends.common.step import ModelStep
from oomproof._backends.tensorflow.beside import BesideDevice
from oomproof._backends.tensorflow.commit import commit_leanly
from oomproof._backends.tensorflow.device import bound_kernel_search, fits_op_by_op
from oomproof._backends.tensorflow.engine import TensorFlowEngine
from oomproof._backends.tensorflow.pieces import joined, on_host, placeholders, signature_of, take, to_host
from oomproof._backends.tensorflow.size_checks import refusing
from oomproof._backends.tensorflow.sparse_rows import clips, how_rows_join, mixed_rows_caveat
from oomproof._backends.tensorflow.untracked import caveats, unchanged, written_outside
from oomproof._backends.tensorflow.writes import PendingWrites, apply_gradients, commit, writes_cannot_wait
from oomproof._records.exactness import Exactness
from oomproof._records.patience import TookTooLongError
from oomproof._records.run import Phase
from oomproof._records.units import tensor_bytes
from oomproof.errors import OomproofError

# So many samples are looked at to see which rows of a table they share.
_LOOKED_UP = 5

logger = logging.getLogger("oomproof")


class _Task(NamedTuple):
    """What a program computes, and whether it writes what a step writes beside weights: statistics, metrics, seeds."""

    computes: Literal["update", "gradients", "test", "predict"]
    writes: bool = True


class TensorFlowStep(ModelStep):
    """Runs logical batches of one compiled model, whole or in pieces.

    Programs are traced when first used and kept; the number of pieces is an input in graph mode, so that it can
    change without a new trace, and a constant under XLA, which needs to know sizes.
    """

    engine: TensorFlowEngine
    evaluating_builds_optimizer = False

    def __init__(self, model: Any) -> None:
        self._eager = bool(model.run_eagerly)
        self.traces_hold_variables = not self._eager
        self._xla = bool(model.jit_compile) and not self._eager
        # XLA looks for kernels when it compiles.
        self.searches_kernels = not self._xla and bool(tf.config.list_logical_devices("GPU"))
        self._programs: dict[Any, Any] = {}
        self._traced: dict[Any, Any] = {}
        self._specs: dict[str, Any] = {}
        # By whether the batch is put together, and whether from the parts of its head alone.
        self._pending: dict[tuple[bool, bool], list[Any]] = {}
        # Whether samples are looked at in graphs alone, by whether that is on the host.
        self._only_in_graphs: set[bool] = set()
        self._beside_device = BesideDevice()
        self._rows_known = False
        self._mixed_rows: list[str] = []
        self._outside: list[Any] | None = None  # Variables written that are not Keras's; unknown before somebody asks.
        super().__init__(model, TensorFlowEngine(model, static=self._xla))

    def bytes_of(self, leaf: Any) -> int:
        values = leaf.flat_values if isinstance(leaf, tf.RaggedTensor) else getattr(leaf, "values", leaf)
        return tensor_bytes(tuple(values.shape), values.dtype.name)

    def _forget_programs(self) -> None:
        self._programs.clear()
        self._traced.clear()

    def equal_pieces_only(self) -> bool:
        return self._xla

    def prepare(self, data: Any, phase: Phase) -> None:
        if self.searches_kernels:
            bound_kernel_search(self.budget)
        super().prepare(data, phase)

    # What is not Keras's

    def _written_outside(self, data: Any) -> list[Any]:
        if self._outside is None:
            few = take(data, 0, min(2, self.batch_size(data)))
            self._outside = written_outside(self.model, unpack(few)[0])
        return self._outside

    def evaluate(self, function: Callable[..., list[Any]], *arguments: Any) -> list[Any]:
        with unchanged(self._outside or ()):
            return super().evaluate(function, *arguments)

    def caveats(self) -> tuple[str, ...]:
        mixed = mixed_rows_caveat(self._mixed_rows) if clips(self.model.optimizer) else ()
        return super().caveats() + caveats(self.model, self._outside or ()) + mixed

    def prove(self, data: Any, samples: int, cut: bool) -> Exactness:
        if cut:
            self._learn_rows(data)
        return super().prove(data, samples, cut)

    # Running it

    def train(self, data: Any, pieces: int, lean: bool, spec: Any = None) -> Any:
        if pieces > 1:
            self._examine(data)
            self._learn_draws(data, training=True)
            self._learn_rows(data)
        with unchanged(self._outside or (), on_failure_only=True):
            return self._train(data, pieces, lean, spec)

    def _train(self, data: Any, pieces: int, lean: bool, spec: Any) -> Any:
        in_place, split = writes_cannot_wait(self.model.optimizer), self.in_pieces(pieces)
        if not lean and not in_place:
            return self._run(_Task("update"), data, pieces, spec, split=split)
        gradients, pending, logs = self._run(_Task("gradients"), data, pieces, spec, split=split)
        apply = self._apply
        if in_place and not lean and not self._eager:
            # Op by op takes the least memory; what must be in place anyway runs as Keras runs it.
            apply = self._programs.setdefault("apply", tf.function(self._apply, autograph=False))
        writes = list(zip(self._pending[split, split and pieces == 1], pending, strict=True))
        with contextlib.nullcontext() if self._eager else self.as_traced():
            commit_leanly(self.model, gradients, writes, apply)
        return logs

    def _apply(self, gradients: list[Any]) -> None:
        self.model.optimizer.apply_gradients(zip(gradients, self.model.trainable_weights, strict=True))

    def test(self, data: Any, pieces: int, spec: Any = None) -> Any:
        if pieces > 1:
            self._examine(data)
            self._learn_draws(data, training=False)
        return self._run(_Task("test"), data, pieces, spec)

    def predict(self, data: Any, pieces: int, spec: Any = None) -> Any:
        if pieces == 1:
            return self._run(_Task("predict"), data, 1, spec)
        self._learn_draws(data, training=False)
        batch_size, random = self.batch_size(data), False in self.draws.random

        def outputs(start: int, size: int) -> Any:
            piece = take(data, start, size)
            # Each from the seeds as they are now: they are as after the whole batch when the last one is done.
            task = _Task("predict", writes=not random or start + size == batch_size)
            within = (start, batch_size) if random else ()
            # Straight to the host: the predictions of the whole batch need not be on the device at once.
            return tree.map_structure(to_host, self._run(task, piece, 1, self._open_spec(piece), within=within))

        return predicted(outputs, batch_size, pieces, joined)

    def probe(self, data: Any, samples: int, phase: Phase) -> None:
        few = take(data, 0, samples)
        if phase != "predict":
            self._examine(data)
        self._learn_draws(data, training=phase == "train")
        # Gradients write nothing by themselves, so training goes on with the program that is traced here.
        task = _Task("gradients") if phase == "train" else _Task(phase, writes=False)
        with unchanged(self._outside or ()):
            self._run(task, few, 1, self._open_spec(few), split=phase == "train")

    def _examine(self, data: Any) -> None:
        self._written_outside(data)
        self._beside_device(lambda: super(TensorFlowStep, self)._examine(data))

    def look_at_predictions(self, data: Any) -> Exactness | None:
        return self._beside_device(lambda: super(TensorFlowStep, self).look_at_predictions(data))

    def _learn_rows(self, data: Any) -> None:
        """How the rows of sparse gradients go together from pieces. Runs the loss as training does."""
        sparse = any(isinstance(leaf, tf.SparseTensor) for leaf in batch_leaves(data))
        if self._rows_known or not (sparse or may_be_sparse(self.model)) or self.batch_size(data) < 2:
            return
        several = range(min(_LOOKED_UP, self.batch_size(data)))
        with unchanged(self._written_outside(data)):
            looks = [self._rows_of_gradients(self.engine.pick(data, samples)) for samples in ([0], several, [0, 0])]
        joins = [
            None if one is None else how_rows_join(one, more, twice, sparse)
            for one, more, twice in zip(*looks, strict=True)
        ]
        self.engine.shared_rows = frozenset(index for index, join in enumerate(joins) if join == "shared")
        self.engine.merged_rows = frozenset(index for index, join in enumerate(joins) if join == "merged")
        self._mixed_rows = [
            v.path for v, join in zip(self.model.trainable_weights, joins, strict=False) if join == "mixed"
        ]
        self._rows_known = True

    def _rows_of_gradients(self, data: Any) -> list[Any]:
        """Which rows each sparse gradient of a batch has; `None` for one that is dense."""
        sparse: list[bool] = []

        def look(data: Any) -> list[Any]:
            gradients, _ = self._phases().whole(data, True)
            sparse[:] = [isinstance(g, tf.IndexedSlices) for g in gradients]
            return [g.indices for g in gradients if isinstance(g, tf.IndexedSlices)]

        rows = iter(self._beside_device(lambda: self.evaluate(look, data)))
        return [next(rows).numpy().tolist() if is_sparse else None for is_sparse in sparse]

    @property
    def learnt(self) -> dict[str, Any]:
        rows = {"shared_rows": sorted(self.engine.shared_rows), "merged_rows": sorted(self.engine.merged_rows)}
        return {**super().learnt, **rows}

    @learnt.setter
    def learnt(self, known: dict[str, Any]) -> None:
        ModelStep.learnt.fset(self, known)  # type: ignore[attr-defined]
        self.engine.shared_rows = frozenset(known["shared_rows"])
        self.engine.merged_rows = frozenset(known["merged_rows"])
        self._rows_known = True

    def step_values(self, data: Any, pieces: int) -> StepValues:
        """Op by op, since a program for so few samples would be traced for this alone; traced where that fails."""
        if pieces > 1:
            self._learn_rows(data)

        def look() -> StepValues:
            return self._values(data, pieces) if self._eager else self._values_outside_of_steps(data, pieces)

        with unchanged(self._written_outside(data)):
            return look() if fits_op_by_op(self.model, self.batch_size(data)) else self._beside_device(look)

    def _values_outside_of_steps(self, data: Any, pieces: int) -> StepValues:
        if self._beside_device.on_host not in self._only_in_graphs:
            try:
                return self._values(data, pieces)
            except (OomproofError, TookTooLongError, tf.errors.ResourceExhaustedError):
                raise
            except Exception as error:
                logger.debug(f"oomproof: not op by op: {error!r}")
                self._only_in_graphs.add(self._beside_device.on_host)
        found: list[StepValues] = []

        def traced(data: Any) -> Any:
            found[:] = [self._values(data, pieces)]
            gradients, written, logs = found[0]
            return [g for g in gradients if g is not None], [value for _, value in written], logs

        dense, written, logs = tf.function(traced, autograph=False)(data)
        given = iter(dense)
        gradients = [None if g is None else next(given) for g in found[0].gradients]
        return StepValues(gradients, [(v, new) for (v, _), new in zip(found[0].written, written, strict=True)], logs)

    def _values(self, data: Any, pieces: int) -> StepValues:
        phases = Phases(self.model, self.engine, self._added_losses)
        scope: PendingWrites
        with self.as_traced(), self.engine.scope() as scope:
            split = self.in_pieces(pieces)
            gradients, logs = phases.split(data, pieces, True) if split else phases.whole(data, True)
            logs = tree.map_structure(lambda log: log.value if isinstance(log, keras.Variable) else log, logs)
            if gradients and not writes_cannot_wait(self.model.optimizer):
                apply_gradients(self.model.optimizer, gradients, self.model.trainable_weights, scope)
            written = scope.settled()
        return StepValues([g if g is None else tf.convert_to_tensor(g) for g in gradients], written, logs)

    # Programs

    def trace_key(self, phase: Phase, data: Any, spec: Any) -> Any:
        if self._eager:
            return None
        if spec is not None:
            return id(spec)  # There is one object for all specs that are the same, and it is kept.
        return tuple(map(signature_of, tf.nest.flatten(data, expand_composites=True)))

    def _open_spec(self, data: Any) -> Any:
        """A spec with the batch size left open, so that pieces of all sizes share one trace; `None` if it cannot be."""
        if any(not isinstance(leaf, tf.Tensor) for leaf in batch_leaves(data)):
            return None
        spec = tree.map_structure(
            lambda leaf: None if leaf is None else tf.TensorSpec([None, *leaf.shape[1:]], leaf.dtype), data
        )
        return self._specs.setdefault(repr(spec), spec)

    @refusing
    def _run(
        self, task: _Task, data: Any, pieces: int, spec: Any, split: bool = False, within: tuple[int, ...] = ()
    ) -> Any:
        """Runs a program. `within` is where the data begins in the batch that it is a part of, and that one's size."""
        split = split or pieces > 1
        self.engine.from_host = split and not self._xla and all(on_host(leaf) for leaf in batch_leaves(data))
        if self._eager:
            result, writes = self._compute(task, data, pieces, split, within=within)
            commit(writes, tree.flatten(result))
            return result
        # XLA needs to know sizes: one program per number of pieces, traced for the sizes at hand. And what runs whole
        # but for its head is no loop over pieces.
        fixed = self._xla or (split and pieces == 1 and self.head is not None)
        compiled_split = self._xla and split
        open_size = compiled_split and spec is not None and first_tensor(unpack(spec)[0]).shape[0] is None
        numbers = within or (pieces,)
        inputs = tuple(map(_number, numbers[:-1] if fixed else numbers))
        program = self._program(task, split, bool(within), numbers[-1] if fixed else None, open_size)
        if spec is None or compiled_split or (self._xla and within):
            return program(data, *inputs)
        # Looking a program up by its spec takes longer than a small step, so remember what was found.
        key = (program, id(spec))
        if key not in self._traced:
            self._traced[key] = (spec, program.get_concrete_function(spec, *inputs))
        return self._traced[key][1](data, *inputs)

    def _program(self, task: _Task, split: bool, within: bool, constant: int | None, open_size: bool) -> Any:
        """A program of the data and of `within` or the number of pieces, whose last number may be a constant of it."""
        key = (task, split, within, constant, open_size, self.engine.from_host)
        if key not in self._programs:
            relaxed = not (self._xla and (split or within))
            places: list[tuple[Any, str]] = []

            def values(data: Any, *inputs: Any) -> Any:
                numbers = inputs if constant is None else (*inputs, constant)
                pieces, place = (1, numbers) if within else (numbers[0], ())
                with self.as_traced():
                    result, writes = self._compute(task, data, pieces, split, open_size, place)
                places[:] = [(variable, how) for variable, how, _ in writes]
                return result, [value for *_, value in writes]

            # XLA takes over the buffers of variables that a program writes, and frees them when it runs out of memory,
            # though the variables still have them. So what it compiles writes nothing, and the writing is done around.
            compiled = tf.function(values, reduce_retracing=relaxed, jit_compile=True, autograph=False)
            compute = compiled if self._xla else values

            def step(data: Any, *inputs: Any) -> Any:
                result, found = compute(data, *inputs)
                writes = [(variable, how, value) for (variable, how), value in zip(places, found, strict=True)]
                commit(writes, tree.flatten(result))
                return result

            self._programs[key] = tf.function(step, reduce_retracing=relaxed, autograph=False)
        return self._programs[key]

    def _compute(
        self, task: _Task, data: Any, pieces: Any, split: bool, open_size: bool = False, within: tuple[Any, ...] = ()
    ) -> tuple[Any, list[tuple[Any, str, Any]]]:
        """What a program returns, and what it is to write."""
        phases = Phases(self.model, self.engine, self._added_losses, open_size)
        scope: PendingWrites
        with self.engine.scope() as scope:
            training = task.computes in ("update", "gradients")
            gradients: Sequence[Any] = ()
            if task.computes == "predict":
                logs = self._outputs(unpack(data)[0], within)
            elif split:
                gradients, logs = phases.split(data, pieces, training)
            else:
                gradients, logs = phases.whole(data, training)
            # A metric may return its variable: what counts is the value that is pending.
            logs = tree.map_structure(lambda log: log.value if isinstance(log, keras.Variable) else log, logs)
            if task.computes == "update" and gradients:
                apply_gradients(self.model.optimizer, gradients, self.model.trainable_weights, scope)
            if task.computes == "gradients":
                pending = scope.pending()
                head_alone = split and isinstance(pieces, int) and pieces == 1
                self._pending[split, head_alone] = [variable for variable, _ in pending]
                return (list(gradients), [value for _, value in pending], logs), []
        return logs, scope.writes() if task.writes else []

    def _outputs(self, x: Any, within: tuple[Any, ...]) -> Any:
        if not within:
            return call(self.model, x, False)
        start, batch_size = within
        with self.engine.drawing(Rows(start, self.engine.size_of(first_tensor(x)), batch_size)):
            return call(self.model, x, False)

    def _recorded_draws(self, data: Any, training: bool) -> list[Draw]:
        if self._eager:
            return super()._recorded_draws(data, training)
        with (
            tf.__internal__.FuncGraph("draws").as_default(),
            self.engine.scope(),
            self.engine.recorded_draws() as found,
        ):
            call(self.model, placeholders(unpack(data)[0]), training)
        return found


@functools.cache
def _number(number: int) -> tf.Tensor:
    return tf.constant(number, tf.int64)
