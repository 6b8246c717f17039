"""Small steps that are run to learn what a larger one needs. They write nothing, so nothing has to be undone."""

from __future__ import annotations

import time

from oomproof._records.patience import PATIENCE
from oomproof._training import piece_sizes
from oomproof._training.helpers import in_a_line
from oomproof._training.training import Batch, Training

# How many may be run; under XLA each of them is a compile.
_PROBES = 8
_COMPILED_PROBES = 3
# How often each is run where a promise rests on it and equal steps do not peak alike: of 20 looks at 21 samples on a
# CPU the lowest took 4.3 MB and the highest 5.4 (tests/backends/shortages.py, "budget").
_REPEATS = 4
# How many of them may fail: each is a wait on TensorFlow.
_FAILURES = 2
# A peak above this share of the limit says how much there was, and not how much was needed.
_ALL = 0.99


def probe(training: Training, batch: Batch, below: int, expected: tuple[int, int] | None = None) -> None:
    """Measures a step at a few sizes below one that is too large, unless that was done already.

    Args:
        training: What is trained.
        batch: Where samples are taken from.
        below: Volumes of at most half of this are run.
        expected: A volume, and what a plan says that it needs.
    """
    step, allowance, measured = training.step, training.allowance, training.measured[batch.phase]
    if measured.evidence.upto(below // 2).needs:
        return
    # Below a limit a failed probe costs a wait. Above a budget it would break a promise.
    bold, compiled = step.budget is None, step.equal_pieces_only()
    if compiled and bold:
        return  # Each size would be compiled for nothing: XLA's own error says what was needed.
    fixed = step.resident()["gradients"] if batch.phase == "train" else 0
    failures, began = 0, time.monotonic()
    for _ in range(_COMPILED_PROBES if compiled else _PROBES):
        if measured.evidence.needs and time.monotonic() - began > PATIENCE:
            training.log.say(
                f"Measuring small batches takes longer than {PATIENCE:.0f} s; going on with what is known."
            )
            return
        free = allowance.free()
        size = piece_sizes.next_probe(
            measured.evidence.upto(below // 2),
            free,
            below,
            batch.unit,
            allowance.headroom,
            fixed=fixed,
            bold=bold,
            expected=expected,
        )
        if size is None:
            return
        fits = _fits(training, batch, size, free)
        failures += fits is False
        if fits is None or (not fits and (not measured.evidence.needs or failures == _FAILURES)):
            return


def _fits(training: Training, batch: Batch, size: int, free: int) -> bool | None:
    """Runs samples of so many bytes, and keeps what they took; `None` where they cannot be run by themselves."""
    samples, measured = size // batch.unit, training.measured[batch.phase]
    before, began = training.allowance.watch(), time.perf_counter()
    try:
        training.step.probe(batch.data, samples, batch.phase)
        if training.step.searches_kernels and samples * batch.unit not in measured.searched:
            measured.searched.add(samples * batch.unit)
            before = training.allowance.watch()
            training.step.probe(batch.data, samples, batch.phase)
        for _ in range(_REPEATS - 1 if training.allowance.covers_reading else 0):
            training.step.probe(batch.data, samples, batch.phase)
        ran = True
    except Exception as error:
        if training.memory.shortage(error) is None:
            if training.settings.budget is not None:
                raise  # Without measuring, no budget can be kept.
            if not training.measuring_failed:
                training.measuring_failed = True
                training.log.say(f"Measuring small batches failed; training goes on without it ({in_a_line(error)}).")
            return None
        ran = False
    if ran:
        measure(training, batch, samples * batch.unit, before)
        return True
    # Here the except block is left and its frames are gone, so memory can come back.
    training.allowance.release()
    measured.evidence = measured.evidence.with_failure(samples * batch.unit, free)
    message = f"Probe of {samples} samples ran out of memory; nothing changed"
    seconds = time.perf_counter() - began
    training.log.note("oom", batch.phase, batch.size, message, before=samples, free=free, seconds=seconds)
    return False


def measure(training: Training, batch: Batch, volume: int, before: int, went_through: bool = False) -> int:
    """What a step of so many bytes has taken beyond `before`, kept as evidence. Returns its peak.

    A first run that looks for kernels says nothing of what others need.
    """
    peak, measured, limit = training.allowance.peak(), training.measured[batch.phase], training.allowance.limit
    training.log.saw_peak(peak)
    if training.step.searches_kernels and volume not in measured.searched:
        measured.searched.add(volume)
        return peak
    need = max(peak - before, 0)
    known = measured.evidence.predict(volume, bound=False)
    if went_through and training.settings.budget is None:
        measured.evidence = measured.evidence.with_pass(volume, need)
        if limit is not None and peak > _ALL * limit and known is not None:
            # It took all there was, and would have made do with less.
            need = min(need, known)
    measured.evidence = measured.evidence.with_need(volume, need)
    return peak
