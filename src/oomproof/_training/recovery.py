"""After a batch ran out of memory: the same batch smaller, by another plan, with a lean update, or not at all."""

from __future__ import annotations

from oomproof._backends.base import Shortage
from oomproof._backends.pieces import largest_piece
from oomproof._records.units import format_bytes
from oomproof._training import messages, piece_sizes
from oomproof._training.foresight import Foresight
from oomproof._training.probing import probe
from oomproof._training.training import Batch, Training

# A size that needs at most this share of what is free should not have failed.
_WITH_EASE = 0.6


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
    if _once_more(training, batch, volume, free, seconds):
        return
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
    if evidence.failed_at(batch.unit) and _is_mostly_free(training, batch, free):
        # A search for kernels may have run out, or the failed step was not gone yet.
        measured = training.measured[batch.phase]
        measured.retried.add(batch.unit)
        measured.evidence = measured.evidence.forgiven(batch.unit)
        probe(training, batch, volume)
        evidence = measured.evidence
    if evidence.failed_at(batch.unit):
        # Not even one sample went through, so halving down to it would only cost waits.
        training.give_up(batch, batch.size, shortage, free, seconds)
    return piece_sizes.smaller(evidence, volume, free, training.allowance.headroom, least=batch.unit)


def _once_more(training: Training, batch: Batch, volume: int, free: int | None, seconds: float) -> bool:
    """Whether the same size is tried again: by what was measured it fits with ease, so what failed it may be over.

    Memory in pieces that are too small, or kernels that are looked for in a first run. Once for each size.
    """
    measured = training.measured[batch.phase]
    need = measured.evidence.predict(volume)
    if free is None or volume in measured.retried:
        return False
    if need is None:
        fits = volume <= batch.unit and _is_mostly_free(training, batch, free)
        reason = "though"
    else:
        fits = need <= _WITH_EASE * free
        reason = f"though by what was measured it needs {format_bytes(need)}, and"
    if not fits:
        return False
    measured.retried |= {volume, batch.unit} if need is None else {volume}
    size = volume // batch.unit
    message = (
        f"a piece of {size} of {batch.size} samples ran out of memory, {reason} "
        f"{format_bytes(free)} are free: trying it once more; nothing lost"
    )
    training.log.note(
        "oom", batch.phase, batch.size, message, before=size, after=size, needed=need, free=free, seconds=seconds
    )
    return True


def _is_mostly_free(training: Training, batch: Batch, free: int | None) -> bool:
    """Whether one sample that failed is tried again: nobody gives up with nearly all memory free at the first try."""
    limit, retried = training.allowance.limit, training.measured[batch.phase].retried
    return free is not None and limit is not None and free > messages.NEARLY_ALL * limit and batch.unit not in retried


def _may_be_the_update(training: Training, batch: Batch, volume: int) -> bool:
    """Not every framework says which part of a step ran out, and an update may take more than one sample does."""
    return batch.phase == "train" and not training.current.lean and volume <= batch.unit


def _at_least(evidence: piece_sizes.Evidence, volume: int, free: int | None) -> int | None:
    """What the failed step needed: by what was measured, but more than what was free, for it did fail."""
    need = evidence.predict(volume)
    return need if need is None or free is None else max(need, free + 1)
