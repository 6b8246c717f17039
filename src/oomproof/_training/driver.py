"""Runs logical batches, whatever the memory does: plan, try, and on a shortage try the same batch smaller.

Framework-free: it knows a backend's step and device memory only through their protocols.
"""

from __future__ import annotations

import dataclasses
import time
import warnings
from collections import Counter
from typing import Any, NamedTuple

from oomproof._backends.base import DeviceMemory, PendingStep, Shortage, Step
from oomproof._records.exactness import Exactness, worse
from oomproof._records.plan import Plan
from oomproof._records.run import Phase, Run
from oomproof._training import messages
from oomproof._training.current_plan import Way
from oomproof._training.foresight import Foresight
from oomproof._training.helpers import optional
from oomproof._training.probing import measure
from oomproof._training.proving import Proving
from oomproof._training.recovery import recover
from oomproof._training.run_log import RunLog
from oomproof._training.settings import Settings
from oomproof._training.training import Batch, Training
from oomproof.errors import InexactWarning

# An allocator that is nearly full waits for memory instead of failing. TensorFlow's waits ten seconds.
_STALL_SECONDS = 8.0


class _Attempt(NamedTuple):
    """What came of running a batch. One that neither ran nor was short of memory is to be run in another way."""

    ran: bool = False
    result: Any = None
    shortage: Shortage | None = None


class Driver:
    """Runs the batches of one guarded model.

    Args:
        step: Runs a batch.
        memory: The device's.
        settings: What the user asked for.
        log: Where it is told what happens; one of its own by default.

    Attributes:
        training: The plan in force, and what was measured.
    """

    def __init__(self, step: Step, memory: DeviceMemory, settings: Settings, log: RunLog | None = None) -> None:
        self.step = step
        self.step.budget = settings.budget
        self.step.settle = self.settle
        self.memory = memory
        self.log = log or RunLog()
        self.training = Training(step, memory, settings, self.log)
        self._settings = settings
        self._foresight = Foresight(self.training)
        self._proving = Proving(step, memory, settings, self.log.say)
        self._proven: Counter[Way] = Counter()
        self._prepared: set[Phase] = set()
        self._looked_at_predictions = False
        self._unrepeated: BaseException | None = None

    # A run, from the begin of fit, evaluate or predict to its end

    def begin(self, may_grow: bool = False) -> None:
        self._unrepeated = None
        self.training.current.may_grow = set(self.training.measured) if may_grow else set()

    def begin_epoch(self, epoch: int) -> None:
        self.log.epoch = epoch
        self.training.current.may_grow = set(self.training.measured)

    def record(self, backend: str, versions: dict[str, str]) -> Run:
        return self.log.record(backend, versions, self.training.allowance.device, self._settings.budget, self.plan)

    @property
    def plan(self) -> Plan:
        return self.training.current.record()

    # One batch

    def run(self, phase: Phase, data: Any, spec: Any = None) -> Any:
        """Runs one logical batch and returns what Keras expects."""
        self.settle(everything=False)
        return self._run(phase, data, spec)

    def settle(self, everything: bool = True) -> None:
        """Waits for steps that were believed before they were done, and runs those again that failed after all."""
        if self._unrepeated is not None:
            # Keras swallows what is raised while it reads logs. A batch that is missing must not be passed over.
            raise self._unrepeated
        while failed := list(self.step.wait_for_pending(everything)):
            try:
                self._repeat(failed)
            except BaseException as error:
                self._unrepeated = error
                for pending in failed:  # Nobody shall wait for what could not be repeated.
                    pending.repeated_with(None)
                raise

    def _repeat(self, failed: list[PendingStep]) -> None:
        error, self.step.failure = self.step.failure, None
        assert error is not None
        shortage = self.memory.shortage(error)
        if shortage is None:
            raise error
        del error
        for pending in failed:
            self.log.steps[pending.batch[0]] -= 1
        batch = self.training.batch(*failed[0].batch)
        recover(self.training, self._foresight, batch, self.training.pieces(batch), shortage, 0.0)
        while failed:
            logs = self._run(*failed[0].batch)
            failed.pop(0).repeated_with(logs)

    def _run(self, phase: Phase, data: Any, spec: Any) -> Any:
        if phase not in self._prepared:
            self.prepare(phase, data)
        batch = self.training.batch(phase, data, spec)
        if phase == "train":
            self.training.current.trains(batch.unit)
        self._foresight.before(batch)
        while True:
            pieces = self.training.pieces(batch)
            changed = any(self.training.current.way(pieces, batch.size))
            if phase == "train" and changed and not self._prove(batch, pieces):
                continue  # Now without what could not be proven.
            if phase != "train" and pieces > 1:
                self._look_at_predictions(batch, pieces)
            began = time.perf_counter()
            attempt = self._attempt(batch, pieces)
            if attempt.shortage is not None:
                # Here the except block is left and its frames are gone, so memory can come back.
                recover(self.training, self._foresight, batch, pieces, attempt.shortage, time.perf_counter() - began)
            elif attempt.ran:
                self.log.finished(phase, batch.size)
                return attempt.result

    def prepare(self, phase: Phase, data: Any) -> None:
        """Builds what is not built yet."""
        shortage = None
        try:
            self.step.prepare(data, phase)
        except Exception as error:
            shortage = self._shortage_behind(error)
            if shortage is None:
                raise
        if shortage is not None:
            self.memory.release()
            raise messages.model_does_not_fit(
                self.training.allowance.device, self.step.resident(), shortage.text
            ) from shortage.error
        self._prepared.add(phase)

    def _shortage_behind(self, error: BaseException | None) -> Shortage | None:
        """What ran out. Keras tells a shortage while it builds a model as an error of its own."""
        seen: list[BaseException] = []
        while error is not None and error not in seen:
            shortage = self.memory.shortage(error)
            if shortage is not None:
                return shortage
            seen.append(error)
            error = error.__cause__ or error.__context__
        return None

    def _attempt(self, batch: Batch, pieces: int) -> _Attempt:
        training, volume = self.training, batch.volume(pieces)
        # A whole batch that is known to fit is not measured again: it then costs what Keras's own step costs.
        known = training.measured[batch.phase].evidence.measured(volume)
        watched = pieces > 1 or self._settings.budget is not None or not known
        measured = training.allowance.measurable and watched
        before = training.allowance.watch() if measured else 0
        began = time.perf_counter()
        try:
            result = self._step(batch, pieces)
        except Exception as error:
            shortage = self.memory.shortage(error)
            if shortage is None and not self._blames_the_plan(batch, error):
                raise
            return _Attempt(shortage=shortage)
        if measured:
            peak = measure(training, batch, volume, before, went_through=True)
            self._watch_for_stalls(batch, pieces, peak, time.perf_counter() - began)
        return _Attempt(ran=True, result=result)

    def _blames_the_plan(self, batch: Batch, error: Exception) -> bool:
        """Whether a step that never ran is tried without what a plan of ours has it recompute: that may be at fault."""
        current, planned = self.training.current, self._settings.start is None
        if batch.phase != "train" or not planned or not current.changes_whole_batches or self.log.steps["train"]:
            return False
        with optional("Recomputing parts of the model" if current.recompute else "Running the head in parts"):
            self._run_as_it_is(batch)
            self._foresight.plan_no_more()
            raise error
        return not current.changes_whole_batches

    def _step(self, batch: Batch, pieces: int) -> Any:
        if batch.phase == "train":
            return self.step.train(batch.data, pieces, self.training.current.lean, batch.spec)
        if batch.phase == "test":
            return self.step.test(batch.data, pieces, batch.spec)
        return self.step.predict(batch.data, pieces, batch.spec)

    def _watch_for_stalls(self, batch: Batch, pieces: int, peak: int, seconds: float) -> None:
        training, volume = self.training, batch.volume(pieces)
        seen = training.measured[batch.phase].quickest
        quickest = seen.get((pieces, volume), seconds)
        seen[pieces, volume] = min(quickest, seconds)
        limit = training.allowance.limit
        assert limit is not None
        if peak > 0.9 * limit and seconds > quickest + _STALL_SECONDS and volume > batch.unit:
            training.resize(batch, "shrink", int(volume * 0.9), needed=peak, free=training.allowance.free())

    # Proofs

    def _prove(self, batch: Batch, pieces: int) -> bool:
        """Before the first batch that is cut or recomputed: is it the training that was asked for?

        Returns:
            Whether the batch may run so. If not, it is now to run in another way.
        """
        proofs, way = self.training.current.proofs, self.training.current.way(pieces, batch.size)
        self._proven[way] += 1
        if way not in proofs:
            proven = self._proving(batch.data, pieces)
            if not proven.holds and self._leaves_out(batch, pieces, proven):
                return False
            self._note_proof(batch, way, proven)
        elif proofs[way].holds and (found := self._proving.again(batch.data, pieces, self._proven[way])):
            self._note_proof(batch, way, found)
        found = proofs[way]
        if not found.holds and self._settings.exact_only:
            raise messages.not_exact(batch.size, pieces, found.why, not self.training.current.recompute)
        self.log.exactness = worse(self.log.exactness, found)
        return True

    def _look_at_predictions(self, batch: Batch, pieces: int) -> None:
        """Once, before a batch is cut that is not trained on: a model may mix samples in inference, too."""
        if self._looked_at_predictions:
            return
        self._looked_at_predictions = True
        found = self._proving.of_predictions(batch.data)
        if found is None:
            return
        if self._settings.exact_only:
            raise messages.not_exact(batch.size, pieces, found.why)
        warnings.warn(f"oomproof: evaluating and predicting are {found}", InexactWarning, stacklevel=2)
        self.log.note("note", batch.phase, batch.size, f"evaluating and predicting are {found}")

    def _leaves_out(self, batch: Batch, pieces: int, proven: Exactness) -> bool:
        """Goes on without what a plan of ours recomputes or has in parts, if that may be why a proof does not hold."""
        current, plan = self.training.current, self.training.current.record()
        ours = current.changes_whole_batches and self._settings.start is None
        if not ours or not (self._settings.exact_only or not self.step.caveats()):
            return False
        self._run_as_it_is(batch)
        if pieces > 1:
            current.proofs[current.way(pieces, batch.size)] = found = self._proving(batch.data, pieces)
            if not found.holds:
                self.training.follow(plan, batch)  # Then it is cutting that is not exact.
                return False
        what = " and ".join((["recomputation"] if plan.recompute else []) + (["head in parts"] if plan.head else []))
        message = f"the plan's {what} is left out: with it, training is {proven}"
        self.log.note("note", batch.phase, batch.size, message)
        self._foresight.plan_no_more()
        return True

    def _run_as_it_is(self, batch: Batch) -> None:
        """Without recomputation, and with the head as all the rest."""
        plain = dataclasses.replace(self.training.current.record(), recompute=(), head=None, head_parts=1)
        self.training.follow(plain, batch)

    def _note_proof(self, batch: Batch, way: Way, found: Exactness) -> None:
        self.training.current.proofs[way] = found
        if not found.holds and not self._settings.exact_only:
            warnings.warn(f"oomproof: training is {found}", InexactWarning, stacklevel=2)
        if found.word != "exact":
            self.log.note("note", batch.phase, batch.size, f"training is {found}")
