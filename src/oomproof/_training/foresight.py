"""Before a batch is run: plan it, start below a budget, shrink ahead of a failure, grow once an epoch."""

from __future__ import annotations

from oomproof._backends.pieces import largest_piece
from oomproof._records.plan import Plan
from oomproof._training import messages, piece_sizes
from oomproof._training.helpers import optional
from oomproof._training.piece_sizes import Evidence
from oomproof._training.probing import probe
from oomproof._training.training import Batch, Training

# How often a plan is made anew, and by how much it is then taken for too low.
_REPLANS = 3
_CAUTION = 1.2
# What is added to a need that is known: the next program is another one.
_HARDLY = 1.02
# A plan that fills more of the room than the first is tried on small pieces, and corrected where they say that it fills
# more than the second of what is free.
_TIGHT = 0.8
_TIGHT_AT_LAST = 0.98
# So often pieces may be made larger and then have to be made smaller again, before they stay small.
_REGRETS = 1
# After so many changes past the first epoch, too: sizes settle.
_CHANGES = 2
# By how much more than a plan says a size is taken to need that could not be measured.
_DOUBT = 1.1
# On a CPU the next batch is read meanwhile, so as much is kept free, but no more than this part of what there is.
_READ_AHEAD = 8
# And a size that took more than this part of what is free does not run again: the next step may take more.
_TIGHT_ON_CPU = 0.95
# A plan within a budget that is not kept by small pieces is made again with so much caution at most.
_MOST_CAUTION = 2.0


class Foresight:
    """Decides how a batch is run before it is."""

    def __init__(self, training: Training) -> None:
        self._training = training
        # How often a plan was asked for. It is made before the first step, and again when it was not kept.
        self._plans = 0
        # The size of the pieces of the last plan, and what it says that they need.
        self._expected: tuple[int, int] | None = None

    def before(self, batch: Batch) -> None:
        training = self._training
        # Not in the middle of a training that goes well, such as for a smaller last batch.
        if batch.phase == "train" and not self._plans and not training.log.steps["train"]:
            self._plan_first(batch)
        if training.pieces(batch) > 1:
            training.check_may_be_cut(batch)
        if not training.allowance.measurable:
            return
        if not training.measured[batch.phase].evidence.needs:
            if training.settings.budget is not None:
                self._start_within_budget(batch)
            return
        if batch.phase in training.current.may_grow:
            training.current.may_grow.discard(batch.phase)
            self._grow(batch)
        self._shrink(batch)

    # Plans

    def _plan_first(self, batch: Batch) -> None:
        training = self._training
        if training.settings.start is None and self._size_is_given(batch):
            # It is tried as it was said. A plan is made when that fails.
            return
        plan = self._plan(batch)
        if plan is None or plan is training.settings.start:
            return
        # Don't grow after one step: the update hides the cost of larger pieces.
        training.current.may_grow.discard("train")
        training.note_plan(batch, "plan", plan, batch.size, training.allowance.free())
        self._try_small(batch, plan)

    def _size_is_given(self, batch: Batch) -> bool:
        """Whether the user chose how this batch is cut, and no budget is in the way of that."""
        settings = self._training.settings
        given = batch.phase == "train" and settings.budget is None and settings.micro_batch_size is not None
        return given and (settings.micro_batch_size or 0) < batch.size

    def _plan(self, batch: Batch, caution: float = 1.0) -> Plan | None:
        """Looks for a way to run this batch before it is run, and takes it; `None` where that changes nothing."""
        self._plans += 1
        training, start, propose = self._training, self._training.settings.start, self._training.settings.propose
        if start is not None:
            return start if training.follow(start, batch) else None
        if propose is None or not training.allowance.measurable:
            return None
        # The model is on the device already, and batches may be, so what is in use counts less their share.
        room = training.allowance.free() + sum(training.held(batch))
        with optional("Planning"):
            plan = propose(batch.data, training.allowance.device, room, caution)
            if plan is None or not training.follow(plan, batch):
                return None
            if plan.predicted is not None:
                self._expected = batch.volume(training.pieces(batch)), plan.predicted - sum(training.held(batch))
            return plan
        self.plan_no_more()  # What failed once is not asked again.
        return None

    def plan_no_more(self) -> None:
        self._plans = _REPLANS + 1

    def _try_small(self, batch: Batch, plan: Plan) -> None:
        """Tries a plan that leaves little room on small pieces first, and corrects it once if they take more than said.

        What kernels take to work in is known to them alone.
        """
        training = self._training
        if not training.step.tries_are_cheap or training.settings.budget is not None or plan.predicted is None:
            return
        held, volume = sum(training.held(batch)), batch.volume(training.pieces(batch))
        if plan.predicted < _TIGHT * (training.allowance.free() + held) or not training.step.splittable(batch.data):
            return
        probe(training, batch, volume)
        need, free = training.measured["train"].evidence.predict(volume), training.allowance.free()
        if need is None or need <= _TIGHT_AT_LAST * free:
            return
        before = largest_piece(batch.size, training.pieces(batch))
        corrected = self._plan(batch, caution=max((held + need) / plan.predicted, 1.0))
        if corrected is not None:
            training.note_plan(batch, "plan", corrected, before, free)

    def plan_again(self, batch: Batch, needed: int | None = None) -> Plan | None:
        """After a failure: a plan where none was thought necessary, or a more cautious one where cutting is not exact.

        Where cutting is exact, pieces that are measured are the better answer to a plan that was not kept; but what a
        compiled program said that it `needed` is as good as a measurement, and corrects the next plan.
        """
        training = self._training
        if training.settings.start is not None or self._plans > _REPLANS:
            return None
        if training.current.is_made and needed is None and not training.step.caveats():
            return None
        return self._plan(batch, caution=self._caution_after(batch, needed))

    def _caution_after(self, batch: Batch, needed: int | None) -> float:
        """By how much the next plan's predictions are raised."""
        training, usual = self._training, _CAUTION**self._plans
        predicted = training.current.record().predicted if training.current.is_made else None
        if needed is None or predicted is None or needed <= training.allowance.free():
            return usual  # By the numbers it should have gone through, so they do not say by how much to go down.
        return max(_HARDLY * (sum(training.held(batch)) + needed) / predicted, 1.0)

    # Sizes

    def _grow(self, batch: Batch) -> None:
        training = self._training
        volume, measured = training.current.volumes.get(batch.phase), training.measured[batch.phase]
        settled = measured.regrets >= _REGRETS or measured.changes >= _CHANGES
        if volume is None or volume >= batch.bytes or settled:
            return
        evidence, free = measured.evidence, training.allowance.free()
        larger = piece_sizes.larger(evidence, volume, free, batch.bytes, training.allowance.headroom)
        if larger is not None:
            training.resize(batch, "grow", larger, free=free)

    def _shrink(self, batch: Batch) -> None:
        training, measured = self._training, self._training.measured[batch.phase]
        volume = batch.volume(training.pieces(batch))
        # A mere bound will do for a budget. Without one, cutting a batch that would have fit is the greater harm.
        strict = training.settings.budget is not None
        need, free = measured.evidence.predict(volume, bound=strict), training.allowance.free()
        if not strict and measured.evidence.passed(volume, free):
            return
        if self._size_is_given(batch) and not measured.evidence.measured(volume):
            return
        # Without a budget a few percent are risked: a needless split costs time in every step, a failure once.
        if (
            need is None
            or need <= free * (_TIGHT_ON_CPU if training.allowance.covers_reading else 1.0 if strict else 1.05)
            or volume <= batch.unit
        ):
            return
        if training.step.splittable(batch.data) and (strict or not training.step.caveats()):
            probe(training, batch, volume, self._expected if batch.phase == "train" else None)
            smaller = piece_sizes.smaller(measured.evidence, volume, free, training.allowance.headroom)
            if smaller is not None:
                training.resize(batch, "shrink", smaller, needed=need, free=free)
                if not strict:
                    # It comes back only with clearly more room than it needs: what is free differs from step to step.
                    measured.evidence = measured.evidence.with_failure(volume, need)

    def _start_within_budget(self, batch: Batch) -> None:
        """Measures a few small pieces and computes the rest, so that no step goes over the budget."""
        training, allowance, budget = self._training, self._training.allowance, self._training.settings.budget
        assert budget is not None
        resident = training.step.resident()
        if batch.phase == "train" and sum(resident.values()) > budget:
            raise messages.budget_below_resident(budget, resident)
        if not training.step.splittable(batch.data):
            return
        volume, need, free = self._fitting(batch)
        planned = batch.volume(training.pieces(batch))
        if volume < planned and self._expected is not None and batch.phase == "train":
            caution = max((need or 0) / (free * allowance.headroom), 1.0) if free else 1.0
            if (plan := self._plan(batch, caution=min(caution, _MOST_CAUTION))) is not None:
                training.note_plan(batch, "plan", plan, planned // batch.unit, free)
                volume, need, free = self._fitting(batch)
                planned = batch.volume(training.pieces(batch))
        if volume < batch.unit:
            # What runs for the first time takes more at times: nobody is refused on one measurement.
            training.measured[batch.phase].evidence = Evidence()
            volume, need, free = self._fitting(batch)
        if volume < batch.unit:
            taken = allowance.taken()
            one = training.measured[batch.phase].evidence.predict(batch.unit) or 0
            enough = (one / allowance.headroom + taken) * 1.05
            raise messages.one_sample_over_budget(budget, one, taken, resident, enough)
        if volume < planned:
            training.resize(batch, "plan", volume, needed=need, free=free)
        # The update makes new values of weights and optimizer beside the old ones, from gradients.
        update = resident["weights"] + resident["optimizer"] + 2 * resident["gradients"]
        if batch.phase == "train" and not training.current.lean and update > free * allowance.headroom:
            training.go_lean(batch, "plan", free, 0.0)

    def _fitting(self, batch: Batch) -> tuple[int, int | None, int]:
        """The most that fits of what is planned, by a few small pieces; what all of it needs; what is free."""
        training, allowance, measured = self._training, self._training.allowance, self._training.measured[batch.phase]
        planned = batch.volume(training.pieces(batch))
        expected = self._expected if batch.phase == "train" else None
        probe(training, batch, max(planned, 2 * batch.unit), expected)
        evidence, free = measured.evidence, allowance.free()
        if allowance.covers_reading:
            free -= min(batch.bytes, free // _READ_AHEAD)
        if expected is not None and evidence.needs:
            evidence = evidence.expecting(expected[0], int(expected[1] * _DOUBT))
        return evidence.largest(free, planned, allowance.headroom) or 0, evidence.predict(planned), free
