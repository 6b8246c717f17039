"""Small steps that are run to learn what a larger one needs. They write nothing, so nothing has to be undone."""

from __future__ import annotations

import time

from oomproof._backends.base import DeviceMemory, Step
from oomproof._training import recover
from oomproof._training.events import Journal
from oomproof._training.memory import Gauge
from oomproof._training.sizing import Batch, Sizing

# How many may be run; under XLA each of them is a compile.
_PROBES = 8
_COMPILED_PROBES = 3
# How many of them may fail: each is a wait on TensorFlow.
_FAILURES = 2


def probe(
    step: Step, memory: DeviceMemory, gauge: Gauge, journal: Journal, sizing: Sizing, batch: Batch, below: int
) -> None:
    """Measures a step at a few sizes below one that is too large, unless that was done already."""
    if sizing.evidence.upto(below // 2).needs:
        return
    # Below a limit a failed probe costs a wait. Above a budget it would break a promise.
    bold, compiled = step.budget is None, step.equal_pieces_only()
    if compiled and bold:
        return  # Each size would be compiled for nothing: XLA's own error says what was needed.
    fixed = step.resident()["gradients"] if batch.phase == "train" else 0
    failures = 0
    for _ in range(_COMPILED_PROBES if compiled else _PROBES):
        free = gauge.free()
        size = recover.next_probe(
            sizing.evidence.upto(below // 2), free, below, batch.unit, gauge.headroom, fixed=fixed, bold=bold
        )
        if size is None:
            return
        samples = size // batch.unit
        before, began, failed = gauge.begin(), time.perf_counter(), False
        try:
            step.probe(batch.data, samples, batch.phase)
        except Exception as error:
            if memory.shortage(error) is None:
                raise
            failed = True
        if failed:
            # Here the except block is left and its frames are gone, so memory can come back.
            gauge.release()
            failures += 1
            sizing.evidence = sizing.evidence.with_failure(samples * batch.unit, free)
            message = f"{samples} samples do not fit, tried to see what fits; nothing lost"
            seconds = time.perf_counter() - began
            journal.note("oom", batch.phase, batch.size, message, before=samples, free=free, seconds=seconds)
            if not sizing.evidence.needs or failures == _FAILURES:
                return
            continue
        measure(gauge, journal, sizing, samples * batch.unit, before)


def measure(gauge: Gauge, journal: Journal, sizing: Sizing, volume: int, before: int) -> int:
    """What a step of so many bytes has taken beyond `before`, kept as evidence. Returns its peak."""
    peak = gauge.end()
    journal.saw_peak(peak)
    sizing.evidence = sizing.evidence.with_need(volume, max(peak - before, 0))
    return peak
