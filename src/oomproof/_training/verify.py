"""`verify`: is a step in pieces the same as a step on the whole batch, for this model and this data?"""

from __future__ import annotations

from typing import Any

import numpy as np

from oomproof import _backends as backends
from oomproof._backends.common import proof
from oomproof._backends.common.compare import culprits, outputs_recorded
from oomproof._backends.common.draws import Rows
from oomproof._backends.common.model import call
from oomproof._backends.common.proving import compared, emulating, epsilon
from oomproof._backends.pieces import checked_size, largest_piece, piece_bounds, piece_count
from oomproof._records.exactness import Exactness
from oomproof._records.verification import Difference, Verification


def verify(model: Any, x: Any, y: Any = None, *, micro_batch_size: int, sample_weight: Any = None) -> Verification:
    """Compares a training step in pieces with the same step on the whole batch, by everything a step writes.

    Nothing is trained: no weight, statistic, metric or seed changes. Random layers draw the same numbers in pieces as
    in the whole batch. Where training in pieces cannot do that, the outcome says so.

    Args:
        model: A compiled Keras model.
        x: Inputs of one batch, small enough to run whole.
        y: Targets of the batch.
        micro_batch_size: The most samples to run at a time; fewer than the batch has.
        sample_weight: Weights of the samples.

    Returns:
        A `Verification`: whether it is exact, what breaks it, and the difference in each variable. It is true if it is
        exact, or exact but for random numbers.

    Raises:
        UnsupportedModelError: If the model has its own `train_step`, or batches of it cannot be cut.
        TypeError: If `micro_batch_size` is not an int.
        ValueError: If the model is not compiled, or `micro_batch_size` is not smaller than the batch.

    Example:

    ```python
    print(oomproof.verify(model, x[:32], y[:32], micro_batch_size=8))
    ```
    """
    backend = backends.current(trains=True)
    backend.check_model(model)
    if not model.compiled:
        raise ValueError("Expected a compiled model. Call `model.compile(...)` before `oomproof.verify`.")
    micro = checked_size(micro_batch_size)
    data = backend.as_batch(x, y, sample_weight)
    batch_size = backend.samples_in(data)
    pieces = piece_count(batch_size, micro)
    if pieces < 2:
        raise ValueError(
            "Expected `micro_batch_size` to be smaller than the batch. "
            f"Received: micro_batch_size={micro_batch_size}, batch of {batch_size}"
        )
    step: Any = backend.step(model)
    step.prepare(data, "train")
    why = step.caveats() + step.odd_losses(data)
    found = compared(step, data, pieces)
    other = step.engine.other_numbers()
    exactness, blamed = Exactness("exact but for random numbers", other) if other else Exactness(), list[str]()
    if why or found.disagreements:
        exactness = Exactness("not exact", why or (proof.summary(found.disagreements),))
        blamed = [*_blame(backend, step, model, data, pieces), *why] or list(exactness.why)
    loss = found.made["log loss"] - found.asked["log loss"] if "log loss" in found.asked else np.zeros(())
    return Verification(
        exactness=exactness,
        batch_size=batch_size,
        micro_batch_size=largest_piece(batch_size, pieces),
        tolerance=proof.tolerance(epsilon(model, step.engine)),
        loss=float(np.abs(loss)) / max(float(np.abs(found.asked.get("log loss", 1.0))), 1e-12),
        differences=tuple(_differences(found.asked, found.made)),
        culprits=tuple(blamed),
        notes=tuple(step.notes()),
    )


def _differences(whole: proof.Values, split: proof.Values) -> list[Difference]:
    gradients = [name for name in whole if name.startswith(proof.GRADIENT)]
    # A gradient that is zero but for rounding is not held to its own size.
    largest = max((float(np.max(np.abs(whole[n]), initial=0.0)) for n in gradients if whole[n] is not None), default=0)
    found = [_difference(name, whole[name], split.get(name), 1e-5 * largest) for name in gradients]
    return sorted(found, key=lambda difference: -difference.relative)


def _difference(name: str, whole: Any, split: Any, floor: float) -> Difference:
    name = name.removeprefix(proof.GRADIENT)
    if whole is None or split is None:
        same = whole is None and split is None
        return Difference(name, 0.0 if same else float("inf"), 0.0 if same else float("inf"))
    absolute = float(np.max(np.abs(whole - split), initial=0.0))
    scale = max(float(np.max(np.abs(whole), initial=0.0)), floor, 1e-30)
    return Difference(name, absolute, absolute / scale)


def _blame(backend: Any, step: Any, model: Any, data: Any, pieces: int) -> list[str]:
    """Names layers that are seen to mix the samples of a batch."""
    size = backend.samples_in(data)

    def layer_calls(start: int, stop: int) -> Any:
        rows = Rows(start, stop - start, size)
        with outputs_recorded(model) as seen, backend.nothing_written(model), step.engine.drawing(rows, whole=True):
            call(model, backend.part_of(data, start, stop)[0], True)
        return seen

    with emulating(step.engine):
        whole, *parts = [layer_calls(start, stop) for start, stop in [(0, size), *piece_bounds(size, pieces)]]
    found = culprits(whole, parts, proof.tolerance(epsilon(model, step.engine)))
    return [f"layer {name}, which mixes the samples of a batch" for name in found]
