"""The transactional step on JAX: a call that raises has changed nothing.

One compiled program computes a whole step, optimizer included, from values it only reads, as long as there is room for
the new values beside the old. Errors arrive late on JAX, and arrays that were given away (donated) to a program that
fails are gone; here the old values are kept until the new ones have arrived (pending_steps.py).

Where there is no such room the step is lean: gradients first, which is waited for, then the optimizer with weights and
slots given away, after a look at whether its program has the memory it is known to need.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any, cast

import jax
import keras
import numpy as np
from keras import tree

from oomproof._backends.common.batch import batch_leaves
from oomproof._backends.common.draws import Draw, Rows
from oomproof._backends.common.engine import PendingWrites
from oomproof._backends.common.model import seed_variables, unpack, uses_kept_tensor
from oomproof._backends.common.phases import Phases
from oomproof._backends.common.predictions import predicted, tensors_in
from oomproof._backends.common.proving import StepValues
from oomproof._backends.common.step import ModelStep
from oomproof._backends.jax import host_batches
from oomproof._backends.jax.compiled import EscapedTensorError, Program, signature
from oomproof._backends.jax.device import JaxMemory, host_for_proofs
from oomproof._backends.jax.engine import JaxEngine
from oomproof._backends.jax.pending_steps import PendingStep
from oomproof._backends.jax.state import LiveState, assign, live_state
from oomproof._backends.pieces import piece_count
from oomproof._compat.jax import on_host
from oomproof._records.run import Phase

# For programs that run once, the quickest to compile first. Which of these options there are depends on the version.
_QUICKLY_COMPILED: tuple[dict[str, Any], ...] = (
    {"xla_backend_optimization_level": 0, "xla_cpu_use_fusion_emitters": False},
    {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True},
)
# Of the memory there is. Smaller batches are on the device as Keras puts them there.
_LARGE = 0.005


class JaxStep(ModelStep):
    """Runs logical batches of one compiled model, whole or in pieces. Programs are compiled once and kept."""

    def __init__(self, model: Any, memory: JaxMemory) -> None:
        super().__init__(model, JaxEngine(model))
        self._memory = memory
        self._apart_from_host = jax.default_backend() != "cpu"
        self._eager = bool(model.run_eagerly) or not model.jit_compile
        self._programs: dict[Any, Any] = {}
        self._pending: list[PendingStep] = []

    def _forget_programs(self) -> None:
        self._programs.clear()

    def equal_pieces_only(self) -> bool:
        return not self._eager

    @property
    def batches_on_device(self) -> int:
        return host_batches.batches_on_device(self.model) if self._apart_from_host else 1

    def _in_place(self, data: Any, pieces: int) -> Any:
        """The batch where its program is to find it: a large one that runs in pieces stays on the host."""
        if not self._apart_from_host or self._eager:
            return data
        x, limit = unpack(data)[0], self._memory.describe().limit
        stays = pieces > 1 and host_batches.can_stay_on_host(self.model) and host_batches.is_dense(x)
        large = limit is not None and stays and sum(leaf.nbytes for leaf in batch_leaves(x)) > _LARGE * limit
        return host_batches.where_wanted(self.model, data, stays and large)

    # Running it

    def train(self, data: Any, pieces: int, lean: bool, spec: Any = None) -> Any:
        if pieces > 1:
            self._examine(data)
            self._learn_draws(data, training=True)
        data = self._in_place(data, pieces)
        if lean:
            return self._train_in_place(data, pieces)
        return self._launch("train", data, pieces, spec)

    def test(self, data: Any, pieces: int, spec: Any = None) -> Any:
        if pieces > 1:
            self._examine(data)
            self._learn_draws(data, training=False)
        return self._launch("test", data, pieces, spec)

    def _launch(self, phase: Phase, data: Any, pieces: int, spec: Any) -> Any:
        program = self._program(phase, data, pieces)
        pending_bytes = sum(pending.needs for pending in self._pending)
        if not (program.proven and program.roomy) or self._memory.is_short_of(program.needs(data), pending_bytes):
            self.settle()
            program.check_room(self._memory, self.budget, data)
        believed = not self._eager and program.proven and program.roomy
        with program.telling_its_needs(data):
            outcome = program(program.values(), data)
            if not believed:
                jax.block_until_ready(outcome)
        _, values, logs = outcome
        updates = list(zip(program.written, values, strict=True))
        if not believed:
            program.proven = True
            assign(updates)
            return logs
        before = [(variable, variable._value) for variable in program.written]
        pending = PendingStep((phase, data, spec), before, outcome, logs, self.settle, program.needs())
        self._memory.pending += 1
        self._pending.append(pending)
        assign(updates)
        return pending.logs()

    def wait_for_pending(self, everything: bool) -> list[PendingStep]:
        """Waits for pending steps, all of them or all but the newest.

        Returns:
            Steps that failed, after everything they wrote was put back. `failure` says what of.
        """
        while len(self._pending) > (0 if everything else 1):
            try:
                self._pending[0].wait()
            except Exception as error:
                self.failure = error
                failed, self._pending = self._pending, []
                self._memory.pending -= len(failed)
                for later in reversed(failed):
                    assign(later.before)
                return failed
            self._pending.pop(0)
            self._memory.pending -= 1
        return []

    def _train_in_place(self, data: Any, pieces: int) -> Any:
        self.settle()
        program = self._program("gradients", data, pieces)
        program.check_room(self._memory, self.budget, data)
        gradients, pending, logs = jax.block_until_ready(program(program.values(), data))
        updates = list(zip(program.written, pending, strict=True))
        if gradients:
            try:
                updates += self._apply_in_place(gradients)
            except Exception as error:
                error.where = "commit"  # type: ignore[attr-defined]
                raise
        assign(updates)
        return logs

    def predict(self, data: Any, pieces: int, spec: Any = None) -> Any:
        self.settle()
        updates: list[tuple[Any, Any]] = []
        if pieces > 1:
            self._learn_draws(data, training=False)

        def outputs(piece: Any, *within: Any) -> Any:
            program = self._program("predict", piece, 1, within)
            program.check_room(self._memory, self.budget, piece)
            _, pending, found = jax.block_until_ready(program(program.values(), piece, *within[:1]))
            updates[:] = zip(program.written, pending, strict=True)
            return found

        def on_host(start: int, size: int) -> Any:
            # Straight to the host: the predictions of the whole batch need not be on the device at once.
            piece = self.engine.take(data, start, size)
            within = (np.int32(start), self.batch_size(data)) if False in self.draws.random else ()
            return jax.tree.map(np.asarray, outputs(piece, *within))

        found = outputs(data) if pieces == 1 else predicted(on_host, self.batch_size(data), pieces, np.concatenate)
        assign(updates)
        return found

    def probe(self, data: Any, samples: int, phase: Phase) -> None:
        """Nothing is run: a program says what it needs when it is compiled, and is kept for when it is used."""
        if phase != "predict":
            self._examine(data)
        self._learn_draws(data, training=phase == "train")
        few, pieces = data, piece_count(self.batch_size(data), samples)
        if phase == "predict" or self._eager:
            few, pieces = self.engine.take(data, 0, samples), 1
        if phase == "train":
            few = self._in_place(few, pieces)
        program = self._program(phase, few, pieces)
        if self._eager:
            jax.block_until_ready(program(program.values(), few))
        else:
            self._memory.ran(program.needs(few), self._memory.current())

    def _apply_in_place(self, gradients: list[Any]) -> list[tuple[Any, Any]]:
        """New values of weights and optimizer in the place of the old ones."""
        live = live_state(self.model)
        variables = [*live.trainable, *live.optimizer]
        weights, slots = ([variable._value for variable in some] for some in (live.trainable, live.optimizer))
        program = self._apply(slots, gradients, weights)
        program.check_room(self._memory, self.budget, (), where="commit")
        # Until it has gone through once, and where nobody can say what is free, it is not trusted with the only copy.
        trusted = program.proven and self._memory.free(self.budget) is not None
        copies = [] if trusted else [np.array(value) for value in [*weights, *slots]]
        try:
            new_weights, new_slots = jax.block_until_ready(program(slots, gradients, weights))
        except BaseException:
            if copies:
                assign([(v, _back(copy, v._value)) for v, copy in zip(variables, copies, strict=True)])
            raise
        program.proven = True
        return list(zip(variables, [*new_weights, *new_slots], strict=True))

    def _apply(self, slots: list[Any], gradients: list[Any], weights: list[Any]) -> Program:
        if "apply" not in self._programs:
            program = Program(self._updated, self._eager, donate=(0, 2))
            with self.as_traced():
                program.compile(slots, gradients, weights)
            self._programs["apply"] = program
        return cast(Program, self._programs["apply"])

    def _updated(self, slots: list[Any], gradients: Sequence[Any], weights: list[Any]) -> Any:
        live = live_state(self.model)
        weights, slots = self.model.optimizer.stateless_apply(slots, gradients, weights)
        return _placed(weights, live.trainable), _placed(slots, live.optimizer)

    # Programs

    def prepare(self, data: Any, phase: Phase) -> None:
        super().prepare(data, phase)
        # Whoever asks has seen that the model may have changed: the lists that Keras was given need not be its own.
        live_state(self.model, anew=True)

    def trace_key(self, phase: Phase, data: Any, spec: Any) -> Any:
        order = live_state(self.model).orders[phase]
        return order if self._eager else (order, signature(data))

    def _program(self, kind: str, data: Any, pieces: int, within: tuple[Any, ...] = ()) -> Program:
        """A program. `within` is where the data begins in the batch that it is a part of, and that one's size."""
        key = (kind, pieces, signature(data), within[1:])
        if key not in self._programs:
            live = live_state(self.model)
            gradients = self.resident()["gradients"] if kind == "train" else None
            program = Program(None, self._eager, live.variables, gradients=gradients, repeats=bool(self.recompute))
            program.function = self._compute(program, kind, pieces, live, *within[1:])
            try:
                with self.as_traced():
                    program.compile(program.values(), data, *within[:1], room=self._memory.room(self.budget))
            except EscapedTensorError as error:
                raise uses_kept_tensor(self.model) from error
            self._programs[key] = program
        return cast(Program, self._programs[key])

    def _compute(self, program: Program, kind: str, pieces: int, live: LiveState, whole: int = 0) -> Callable[..., Any]:
        training = kind in ("train", "values", "gradients")

        def compute(values: list[Any], data: Any, *start: Any) -> Any:
            phases = Phases(self.model, self.engine, self._added_losses)
            gradients: Sequence[Any] = ()
            known = {id(v): value for v, value in zip(live.variables, values, strict=True)}
            with PendingWrites(known) as scope:
                if kind == "predict":
                    logs = self._outputs(data, start, whole)
                elif self.in_pieces(pieces, training):
                    gradients, logs = phases.split(data, pieces, training)
                else:
                    gradients, logs = phases.whole(data, training)
                # A metric may return its variable: what counts is the value that is pending.
                logs = tree.map_structure(lambda log: log.value if isinstance(log, keras.Variable) else log, logs)
            # What else is written, such as a variable that a loss of the user's own keeps, Keras's own step forgets.
            pending = [(variable, value) for variable, value in scope.pending() if id(variable) in known]
            program.written = [variable for variable, _ in pending]
            found = _placed([value for _, value in pending], program.written)
            if kind in ("train", "values") and gradients:
                slots, weights = ([known[id(v)] for v in some] for some in (live.optimizer, live.trainable))
                new_weights, new_slots = self._updated(slots, gradients, weights)
                program.written += [*live.trainable, *live.optimizer]
                found += [*new_weights, *new_slots]
                gradients = () if kind == "train" else gradients
            return _placed(gradients, live.trainable) if gradients else [], found, logs

        return compute

    def step_values(self, data: Any, pieces: int) -> StepValues:
        program, run = self._values_program(data, pieces)
        values = program.values()
        # On the host there is room for it, and compiling for it takes seconds.
        host = host_for_proofs()
        if host is not None:
            values, data = jax.device_put((values, data), host)
        with jax.default_device(host), on_host() if host is not None else contextlib.nullcontext(), self.as_traced():
            gradients, written, logs = run(values, data)
        return StepValues(gradients, list(zip(program.written, written, strict=True)), logs)

    def _values_program(self, data: Any, pieces: int) -> tuple[Program, Callable[..., Any]]:
        key = ("values", pieces, signature(data), self.recompute, self.head)
        known = self._programs.get(key)
        if known is None:
            live = live_state(self.model)
            program = Program(None, self._eager, live.variables)
            program.function = self._compute(program, "values", pieces, live)
            run = program.function if self._eager else jax.jit(program.function, compiler_options=_quickly_compiled())
            known = program, run
            if not seed_variables(self.model):
                # With random layers, what is drawn in another order is another program.
                self._programs[key] = known
        return known

    def _outputs(self, data: Any, start: tuple[Any, ...], whole: int) -> Any:
        x = unpack(data)[0]
        if not start:
            return self.engine.call(x, False)
        with self.engine.drawing(Rows(start[0], self.batch_size(data), whole)):
            return self.engine.call(x, False)

    def evaluate(self, function: Callable[..., list[Any]], *arguments: Any) -> list[Any]:
        variables = live_state(self.model).variables

        def compute(values: list[Any], arguments: Any) -> list[Any]:
            with PendingWrites({id(v): value for v, value in zip(variables, values, strict=True)}):
                return function(*arguments)

        run = compute if self._eager else jax.jit(compute, compiler_options=_quickly_compiled())
        with self.as_traced():
            return list(run([v._value for v in variables], arguments))

    def _recorded_draws(self, data: Any, training: bool) -> list[Draw]:
        if self._eager:
            return super()._recorded_draws(data, training)
        with self.engine.recorded_draws() as found:
            self._number_of_losses(data, training)  # A trace, and nothing else.
        return found

    def _added_by_layers(self, data: Any, training: bool, rows: Rows, moved: bool = False) -> list[float]:
        if not self._eager and not self._number_of_losses(data, training):
            return []  # Known from a trace: nothing has to be compiled to see it.
        return super()._added_by_layers(data, training, rows, moved)

    def _number_of_losses(self, data: Any, training: bool) -> int:
        return len(self._shapes(data, training)[1])

    def _shapes_of_outputs(self, data: Any) -> list[tuple[int, ...]]:
        return [tuple(output.shape) for output in self._shapes(data, training=False)[0]]

    def _shapes(self, data: Any, training: bool) -> tuple[list[Any], list[Any]]:
        """Shapes of the outputs, and of the losses that layers add, from a trace."""
        variables = live_state(self.model).variables

        def compute(values: list[Any], data: Any) -> tuple[list[Any], list[Any]]:
            with PendingWrites({id(v): value for v, value in zip(variables, values, strict=True)}) as scope:
                outputs = self.engine.call(unpack(data)[0], training)
            return tensors_in(outputs), list(scope.losses)

        with self.as_traced():
            shapes: tuple[list[Any], list[Any]] = jax.eval_shape(compute, [v._value for v in variables], data)
        return shapes


@functools.cache
def _quickly_compiled() -> dict[str, Any] | None:
    for options in _QUICKLY_COMPILED:
        try:
            jax.jit(lambda: 0, compiler_options=options)()
            return options
        except Exception:  # Whatever it raises for an option that it does not know.
            continue
    return None


def _back(copy: Any, lost: Any) -> Any:
    """A copy from the host in the place of an array that is gone; on the host itself where the device has no room."""
    try:
        return jax.block_until_ready(jax.device_put(copy, lost.sharding))
    except Exception:
        return copy


def _placed(values: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
    """On several devices: where the variables are, so that programs find them there in the next step."""
    if keras.distribution.distribution() is None:
        return list(values)
    pairs = zip(values, variables, strict=True)
    return [jax.lax.with_sharding_constraint(value, variable._value.sharding) for value, variable in pairs]
