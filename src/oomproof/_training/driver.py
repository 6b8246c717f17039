"""Runs logical batches, whatever the memory does: plan, try, and on a shortage try the same batch smaller.

Framework-free: it knows a backend's step and device memory only through their protocols.

What a piece needs is counted against its volume, the bytes of its samples, rather than their number: batches of
sequences padded to different lengths then share what was learned.
"""

from __future__ import annotations

import dataclasses
import time
import warnings
from collections import Counter
from typing import Any

from oomproof._backends.base import DeviceMemory, PendingStep, Shortage, Step
from oomproof._backends.pieces import largest_piece, piece_count
from oomproof._records.exactness import Exactness, worse
from oomproof._records.plan import Plan
from oomproof._records.run import EventKind, Phase, Run
from oomproof._records.units import format_bytes
from oomproof._training import messages, recover
from oomproof._training.events import Journal, reason
from oomproof._training.memory import Gauge
from oomproof._training.probing import measure, probe
from oomproof._training.proving import Proving
from oomproof._training.sizing import Batch, Settings, Sizing
from oomproof.errors import InexactWarning

# How often a plan is made anew, and by how much it is then taken for too low.
_REPLANS = 3
_CAUTION = 1.2
# A plan that fills more of the room than the first is tried on small pieces, and corrected where they say that it fills
# more than the second of what is free.
_TIGHT = 0.8
_TIGHT_AT_LAST = 0.98
# An allocator that is nearly full waits for memory instead of failing. TensorFlow's waits ten seconds.
_STALL_SECONDS = 8.0


class Driver:
    """The state of one guarded model: how large pieces are, what was measured, what happened."""

    def __init__(self, step: Step, memory: DeviceMemory, settings: Settings) -> None:
        self.step = step
        self.step.budget = settings.budget
        self.step.settle = self.settle
        self.memory = memory
        self.settings = settings
        self.journal = Journal()
        self.last_error: Exception | None = None
        self._gauge = Gauge(memory, settings.budget)
        self.proving = Proving(step, memory, settings, lambda message: self.journal.say(message))
        self._sizing: dict[Phase, Sizing] = {"train": Sizing(), "test": Sizing(), "predict": Sizing()}
        self._prepared: set[Phase] = set()
        self._lean = settings.start is not None and settings.start.lean_commit
        # What was proven of the ways batches were run in: whether they are cut, and what is recomputed.
        self._proofs: dict[tuple[bool, tuple[str, ...]], Exactness] = {}
        self._proven: Counter[tuple[bool, tuple[str, ...]]] = Counter()
        self._unit = 1
        self._unrepeated: BaseException | None = None
        self._planned: Plan | None = None
        # How often a plan was asked for. It is made before the first step, and again when it was not kept.
        self._plans = 0

    # A run, from the begin of fit, evaluate or predict to its end

    def begin(self, silent: bool, may_grow: bool = False, journal: Journal | None = None) -> None:
        self.journal = journal or Journal()
        self.journal.silent = silent
        self._unrepeated = None
        for sizing in self._sizing.values():
            sizing.may_grow = may_grow

    def begin_epoch(self, epoch: int) -> None:
        self.journal.epoch = epoch
        for sizing in self._sizing.values():
            sizing.may_grow = True

    def record(self, backend: str, versions: dict[str, str]) -> Run:
        return self.journal.record(backend, versions, self._gauge.device, self.settings.budget, self.plan)

    @property
    def plan(self) -> Plan:
        micro = self._micro("train", self._unit)
        made = self._planned or Plan()
        if made.micro_batch_size != micro:
            # Its figures are no longer those of what runs.
            made = dataclasses.replace(made, predicted=None, relative_time=None, alternatives=())
        exactness = self._proofs.get((micro is not None, self.step.recompute))
        why = () if exactness is None or exactness.holds else exactness.why
        return dataclasses.replace(
            made,
            micro_batch_size=micro,
            recompute=self.step.recompute,
            lean_commit=self._lean,
            caveats=tuple(dict.fromkeys([*why, *(made.caveats if made.precision else ())])),
            exactness=exactness,
        )

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
            self.journal.steps[pending.batch[0]] -= 1
        phase, data, spec = failed[0].batch
        batch = Batch(phase, data, spec, self.step.batch_size(data), self.step.sample_bytes(data))
        self._recover(batch, self._pieces(batch), shortage, 0.0)
        while failed:
            logs = self._run(*failed[0].batch)
            failed.pop(0).repeated_with(logs)

    def _run(self, phase: Phase, data: Any, spec: Any) -> Any:
        if phase not in self._prepared:
            self.prepare(phase, data)
        batch = Batch(phase, data, spec, self.step.batch_size(data), self.step.sample_bytes(data))
        if phase == "train":
            self._unit = batch.unit
        self._before(batch)
        while True:
            pieces = self._pieces(batch)
            if phase == "train" and (pieces > 1 or self.step.recompute):
                self._prove(batch, pieces)
            began = time.perf_counter()
            result, shortage = self._attempt(batch, pieces)
            if shortage is None:
                self.journal.finished(phase, batch.size)
                return result
            # Here the except block is left and its frames are gone, so memory can come back.
            self._recover(batch, pieces, shortage, time.perf_counter() - began)

    def prepare(self, phase: Phase, data: Any) -> None:
        """Builds what is not built yet."""
        shortage = None
        try:
            self.step.prepare(data, phase)
        except Exception as error:
            shortage = self.memory.shortage(error)
            if shortage is None:
                raise
        if shortage is not None:
            self.memory.release()
            raise messages.model_does_not_fit(
                self._gauge.device, self.step.resident(), shortage.text
            ) from shortage.error
        self._prepared.add(phase)

    def _micro(self, phase: Phase, unit: int) -> int | None:
        """Samples a piece may hold at most, or `None` for no limit."""
        volume = self._sizing[phase].volume
        limits = [] if volume is None else [max(1, volume // unit)]
        if phase == "train":
            limits += [self.settings.micro_batch_size] if self.settings.micro_batch_size else []
            start = self.settings.start
            limits += [start.micro_batch_size] if start and start.micro_batch_size and volume is None else []
        return min(limits, default=None)

    def _pieces(self, batch: Batch) -> int:
        pieces = piece_count(batch.size, self._micro(batch.phase, batch.unit))
        if self.step.equal_pieces_only() and pieces > 1:
            # Each number of pieces is a compile: powers of two keep them few.
            pieces = 1 << (pieces - 1).bit_length()
        return min(pieces, max(batch.size, 1))

    def _attempt(self, batch: Batch, pieces: int) -> tuple[Any, Shortage | None]:
        sizing, volume = self._sizing[batch.phase], batch.volume(pieces)
        # A whole batch that is known to fit is not measured again: it then costs what Keras's own step costs.
        watched = pieces > 1 or self.settings.budget is not None or not sizing.evidence.measured(volume)
        measured = self._gauge.measurable and watched
        before = self._gauge.begin() if measured else 0
        began = time.perf_counter()
        try:
            if batch.phase == "train":
                result = self.step.train(batch.data, pieces, self._lean, batch.spec)
            elif batch.phase == "test":
                result = self.step.test(batch.data, pieces, batch.spec)
            else:
                result = self.step.predict(batch.data, pieces, batch.spec)
        except Exception as error:
            shortage = self.memory.shortage(error)
            if shortage is None:
                raise
            return None, shortage
        if measured:
            peak = measure(self._gauge, self.journal, self._sizing[batch.phase], volume, before)
            self._watch_for_stalls(batch, pieces, peak, time.perf_counter() - began)
        return result, None

    def _watch_for_stalls(self, batch: Batch, pieces: int, peak: int, seconds: float) -> None:
        sizing, volume = self._sizing[batch.phase], batch.volume(pieces)
        quickest = sizing.quickest.get((pieces, volume), seconds)
        sizing.quickest[pieces, volume] = min(quickest, seconds)
        assert self._gauge.limit is not None
        if peak > 0.9 * self._gauge.limit and seconds > quickest + _STALL_SECONDS and volume > batch.unit:
            self._resize(batch, "shrink", int(volume * 0.9), needed=peak, free=self._gauge.free())

    # Before a batch: start below the budget, shrink ahead of a failure, grow once an epoch, but not in that of a plan

    def _before(self, batch: Batch) -> None:
        if batch.phase == "train" and not self._plans:
            plan = self._plan_ahead(batch)
            if plan is not None and plan is not self.settings.start:
                # One step is no reason to know better. What its update takes hides what larger pieces would.
                self._sizing["train"].may_grow = False
                self._note_plan(batch, "plan", plan, batch.size, self._gauge.free())
                self._verify(batch, plan)
        if self._pieces(batch) > 1:
            self._check_splittable(batch)
        if not self._gauge.measurable:
            return
        sizing = self._sizing[batch.phase]
        if not sizing.evidence.needs:
            if self.settings.budget is not None:
                self._start_within_budget(batch)
            return
        if sizing.may_grow:
            sizing.may_grow = False
            self._grow(batch)
        volume = batch.volume(self._pieces(batch))
        # A mere bound will do for a budget. Without one, cutting a batch that would have fit is the greater harm.
        strict = self.settings.budget is not None
        need, free = sizing.evidence.predict(volume, bound=strict), self._gauge.free()
        # Without a budget a few percent are risked: a needless split costs time in every step, a failure once.
        if need is None or need <= free * (1.0 if strict else 1.05) or volume <= batch.unit:
            return
        if self.step.splittable(batch.data) and (strict or not self.step.caveats()):
            self._probe(batch, volume)
            smaller = recover.smaller(sizing.evidence, volume, free, self._gauge.headroom)
            if smaller is not None:
                self._resize(batch, "shrink", smaller, needed=need, free=free)

    def _plan_ahead(self, batch: Batch, caution: float = 1.0) -> Plan | None:
        """Looks for a way to run this batch before it is run, and takes it; `None` where that changes nothing."""
        self._plans += 1
        plan, propose = self.settings.start, self.settings.propose
        if plan is None and propose is not None and self._gauge.measurable:
            # The model is on the device already, and batches may be, so what is in use counts less their share.
            room = self._gauge.free() + sum(self._there(batch))
            plan = propose(batch.data, self._gauge.device, room, caution)
        if plan is None:
            return None
        sizing = self._sizing["train"]
        changed = plan.recompute != self.step.recompute
        if changed:
            # What was measured, and what failed, is another step.
            sizing.evidence = recover.Evidence()
            self.step.recompute = plan.recompute
        self._lean |= plan.lean_commit
        if plan.micro_batch_size is not None and self.settings.start is None:
            volume = plan.micro_batch_size * batch.unit
            changed |= sizing.volume is None or volume < sizing.volume
            sizing.volume = volume
        if not changed:
            return None
        self._planned = plan
        return plan

    def _verify(self, batch: Batch, plan: Plan) -> None:
        """Tries a plan that leaves little room on small pieces first, and corrects it once if they take more than said.

        What kernels take to work in is known to them alone.
        """
        if not self.step.tries_are_cheap or self.settings.budget is not None or plan.predicted is None:
            return
        there, volume = sum(self._there(batch)), batch.volume(self._pieces(batch))
        if plan.predicted < _TIGHT * (self._gauge.free() + there) or not self.step.splittable(batch.data):
            return
        self._probe(batch, volume)
        need, free = self._sizing["train"].evidence.predict(volume), self._gauge.free()
        if need is None or need <= _TIGHT_AT_LAST * free:
            return
        before = largest_piece(batch.size, self._pieces(batch))
        corrected = self._plan_ahead(batch, caution=max((there + need) / plan.predicted, 1.0))
        if corrected is not None:
            self._note_plan(batch, "plan", corrected, before, free)

    def _there(self, batch: Batch) -> tuple[int, int, int]:
        """Bytes on the device that a plan counts, too: the model's, its optimizer's, and those of batches."""
        resident = self.step.resident()
        return resident["weights"], resident["optimizer"], self.step.batches_on_device * batch.bytes

    def _note_plan(
        self, batch: Batch, kind: EventKind, plan: Plan, before: int, free: int | None, seconds: float = 0.0
    ) -> None:
        message = plan.sentence if kind == "plan" else f"ran out of memory, so now {plan.sentence}; nothing lost"
        after = largest_piece(batch.size, self._pieces(batch))
        self.journal.note(
            kind,
            batch.phase,
            batch.size,
            message,
            before=before,
            after=after,
            needed=plan.predicted,
            free=free,
            seconds=seconds,
        )

    def _grow(self, batch: Batch) -> None:
        sizing, free = self._sizing[batch.phase], self._gauge.free()
        if sizing.volume is None or sizing.volume >= batch.size * batch.unit:
            return
        larger = recover.larger(sizing.evidence, sizing.volume, free, batch.size * batch.unit, self._gauge.headroom)
        if larger is not None:
            self._resize(batch, "grow", larger, free=free)

    def _probe(self, batch: Batch, below: int) -> None:
        probe(self.step, self.memory, self._gauge, self.journal, self._sizing[batch.phase], batch, below)

    def _start_within_budget(self, batch: Batch) -> None:
        """Measures a few small pieces and computes the rest, so that no step goes over the budget."""
        budget = self.settings.budget
        assert budget is not None
        resident = self.step.resident()
        least = sum(resident.values())
        if batch.phase == "train" and least > budget:
            raise messages.budget_below_resident(budget, resident)
        if not self.step.splittable(batch.data):
            return
        self._probe(batch, batch.size * batch.unit)
        evidence, free = self._sizing[batch.phase].evidence, self._gauge.free()
        volume = evidence.largest(free, batch.size * batch.unit, self._gauge.headroom)
        if volume is None or volume < batch.unit:
            need, taken = evidence.predict(batch.unit) or 0, self._gauge.taken()
            enough = (need / self._gauge.headroom + taken) * 1.05
            raise messages.one_sample_over_budget(budget, need, taken, resident, enough)
        if volume < batch.volume(self._pieces(batch)):
            whole = evidence.predict(batch.size * batch.unit)
            self._resize(batch, "plan", volume, needed=whole, free=free)
        # The update makes new values of weights and optimizer beside the old ones, from gradients.
        update = resident["weights"] + resident["optimizer"] + 2 * resident["gradients"]
        if batch.phase == "train" and not self._lean and update > free * self._gauge.headroom:
            self._go_lean(batch, "plan", free, 0.0)

    # After a failure

    def _recover(self, batch: Batch, pieces: int, shortage: Shortage, seconds: float) -> None:
        self._gauge.release()
        sizing, volume = self._sizing[batch.phase], batch.volume(pieces)
        # A new plan forgets what failed under the old one: not before the next epoch is anything larger tried again.
        sizing.may_grow = False
        free = self._gauge.free() if self._gauge.measurable else None
        if shortage.where == "commit":
            if self._lean:
                self._give_up(batch, pieces, shortage, free, seconds)
            self._go_lean(batch, "commit-oom", free, seconds)
            return
        if shortage.needed is not None:
            sizing.evidence = sizing.evidence.with_need(volume, shortage.needed)
        sizing.evidence = sizing.evidence.with_failure(volume, free)
        if batch.phase == "train" and (plan := self._plan_again(batch)) is not None:
            self._note_plan(batch, "oom", plan, largest_piece(batch.size, pieces), free, seconds)
            return
        smaller = None
        if volume > batch.unit and self.step.splittable(batch.data):
            if self._gauge.measurable:
                self._probe(batch, volume)
            if sizing.evidence.failed_at(batch.unit):
                # Not even one sample went through, so halving down to it would only cost waits.
                self._give_up(batch, batch.size, shortage, free, seconds)
            smaller = recover.smaller(sizing.evidence, volume, free, self._gauge.headroom, least=batch.unit)
        if smaller is not None:
            self._resize(batch, "oom", smaller, needed=_at_least(sizing, volume, free), free=free, seconds=seconds)
        elif batch.phase == "train" and not self._lean and volume <= batch.unit and self.step.equal_pieces_only():
            # Perhaps it was the update after all: XLA does not say which part of a program ran out.
            self._go_lean(batch, "commit-oom", free, seconds)
        else:
            self._give_up(batch, pieces, shortage, free, seconds)

    def _plan_again(self, batch: Batch) -> Plan | None:
        """After a failure: a plan where none was thought necessary, or a more cautious one where cutting is not exact.

        Where cutting is exact, pieces that are measured are the better answer to a plan that was not kept.
        """
        if self.settings.start is not None or self._plans > _REPLANS:
            return None
        if self._planned is not None and not self.step.caveats():
            return None
        return self._plan_ahead(batch, caution=_CAUTION**self._plans)

    def _go_lean(self, batch: Batch, kind: EventKind, free: int | None, seconds: float) -> None:
        self._lean = True
        room = "" if free is None else f" ({format_bytes(free)} free)"
        message = (
            f"no room for the optimizer's new values beside the old ones{room}: updates are now applied in place, "
            f"with a copy on the host; step {self.journal.steps[batch.phase]}, nothing lost"
        )
        size = largest_piece(batch.size, self._pieces(batch))
        self.journal.note(kind, batch.phase, batch.size, message, before=size, after=size, free=free, seconds=seconds)

    def _resize(
        self,
        batch: Batch,
        kind: EventKind,
        volume: int,
        *,
        needed: int | None = None,
        free: int | None = None,
        seconds: float = 0.0,
    ) -> None:
        before = largest_piece(batch.size, self._pieces(batch))
        if kind != "grow":
            self._check_splittable(batch)
        self._sizing[batch.phase].volume = volume
        pieces = self._pieces(batch)
        after = largest_piece(batch.size, pieces)
        what = "batch" if batch.phase == "train" else f"{batch.phase} batch"
        how = "whole" if pieces == 1 else f"as {pieces} × {after}"
        message = f"{what} {batch.size} now runs {how}: {reason(kind, needed, free)}; "
        message += f"step {self.journal.steps[batch.phase]}, nothing lost"
        self.journal.note(
            kind,
            batch.phase,
            batch.size,
            message,
            before=before,
            after=after,
            needed=needed,
            free=free,
            seconds=seconds,
        )

    def _check_splittable(self, batch: Batch) -> None:
        if not self.step.splittable(batch.data):
            raise messages.batch_cannot_be_cut(batch.size)
        if not self.settings.may_split:
            raise messages.cutting_is_not_allowed(batch.size)

    def _prove(self, batch: Batch, pieces: int) -> None:
        """Before the first batch that is cut or recomputed: is it the training that was asked for?"""
        way = pieces > 1, self.step.recompute
        self._proven[way] += 1
        if way not in self._proofs:
            self._note_proof(batch, way, self.proving(batch.data, pieces))
        elif self._proofs[way].holds and (found := self.proving.again(batch.data, pieces, self._proven[way])):
            self._note_proof(batch, way, found)
        found = self._proofs[way]
        if not found.holds and self.settings.exact_only:
            raise messages.not_exact(batch.size, pieces, found.why)
        self.journal.exactness = worse(self.journal.exactness, found)

    def _note_proof(self, batch: Batch, way: tuple[bool, tuple[str, ...]], found: Exactness) -> None:
        self._proofs[way] = found
        if not found.holds and not self.settings.exact_only:
            warnings.warn(f"oomproof: training is {found}", InexactWarning, stacklevel=2)
        if found.word != "exact":
            self.journal.note("note", batch.phase, batch.size, f"training is {found}")

    def _give_up(self, batch: Batch, pieces: int, shortage: Shortage, free: int | None, seconds: float) -> None:
        size = largest_piece(batch.size, pieces)
        what = "The optimizer's update" if shortage.where == "commit" else f"A piece of {size} of {batch.size} samples"
        message = f"giving up: {what[0].lower()}{what[1:]} does not fit"
        self.journal.note("oom", batch.phase, batch.size, message, before=size, free=free, seconds=seconds)
        self.last_error = shortage.error
        splittable, resident = self.step.splittable(batch.data), self.step.resident()
        raise messages.gave_up(
            what, self._gauge.device, free, self._gauge.limit, splittable, resident, shortage.text
        ) from shortage.error


def _at_least(sizing: Sizing, volume: int, free: int | None) -> int | None:
    """What the failed step needed: by what was measured, but more than what was free, for it did fail."""
    need = sizing.evidence.predict(volume)
    return need if need is None or free is None else max(need, free + 1)
