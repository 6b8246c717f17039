"""After a batch ran out of memory: the same batch smaller, by another plan, with a lean update, or not at all."""

from __future__ import annotations

from oomproof._backends.base import Shortage
from oomproof._backends.pieces import largest_piece
from oomproof._training import piece_sizes
from oomproof._training.foresight import Foresight
from oomproof._training.probing import probe
from oomproof._training.training import Batch, Training


def recover(
    training: Training, foresight: Foresight, batch: Batch, pieces: int, shortage: Shortage, seconds: float
) -> None:
    """Changes how a batch is run that ran out of memory in so many pieces.

    Raises:
        RecoveryFailedError: When nothing is left to change.
    """
    training.allowance.release()
    # A new plan forgets what failed under the old one: not before the next epoch is anything larger tried again.
    training.current.may_grow.discard(batch.phase)
    free = training.free()
    if shortage.where == "commit":
        if training.current.lean:
            training.give_up(batch, pieces, shortage, free, seconds)
        training.go_lean(batch, "commit-oom", free, seconds)
        return
    measured, volume = training.measured[batch.phase], batch.volume(pieces)
    if shortage.needed is not None:
        measured.evidence = measured.evidence.with_need(volume, shortage.needed)
    measured.evidence = measured.evidence.with_failure(volume, free)
    if batch.phase == "train" and (plan := foresight.plan_again(batch, shortage.needed)) is not None:
        training.note_plan(batch, "oom", plan, largest_piece(batch.size, pieces), free, seconds)
        return
    smaller = _smaller(training, batch, volume, shortage, free, seconds)
    if smaller is not None:
        needed = _at_least(measured.evidence, volume, free)
        training.resize(batch, "oom", smaller, needed=needed, free=free, seconds=seconds)
    elif _may_be_the_update(training, batch, volume):
        training.go_lean(batch, "commit-oom", free, seconds)
    else:
        training.give_up(batch, pieces, shortage, free, seconds)


def _smaller(
    training: Training, batch: Batch, volume: int, shortage: Shortage, free: int | None, seconds: float
) -> int | None:
    """A volume to try next, or `None` where there is none."""
    if volume <= batch.unit or not training.step.splittable(batch.data):
        return None
    if training.allowance.measurable:
        probe(training, batch, volume)
    evidence = training.measured[batch.phase].evidence
    if evidence.failed_at(batch.unit):
        # Not even one sample went through, so halving down to it would only cost waits.
        training.give_up(batch, batch.size, shortage, free, seconds)
    return piece_sizes.smaller(evidence, volume, free, training.allowance.headroom, least=batch.unit)


def _may_be_the_update(training: Training, batch: Batch, volume: int) -> bool:
    """XLA does not say which part of a program ran out."""
    compiled, lean = training.step.equal_pieces_only(), training.current.lean
    return batch.phase == "train" and not lean and volume <= batch.unit and compiled


def _at_least(evidence: piece_sizes.Evidence, volume: int, free: int | None) -> int | None:
    """What the failed step needed: by what was measured, but more than what was free, for it did fail."""
    need = evidence.predict(volume)
    return need if need is None or free is None else max(need, free + 1)
