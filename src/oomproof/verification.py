"""verify: is a micro-batched step the same as a full-batch one, for this model and this data?"""

from __future__ import annotations

from typing import Any

import numpy as np

from oomproof import backends
from oomproof.backends.common.compare import culprits, outputs_recorded, without_randomness
from oomproof.backends.common.model import call, statistics_layers
from oomproof.records import Difference, Verification
from oomproof.step.split import checked_size, largest_piece, piece_bounds, piece_count


def verify(model: Any, x: Any, y: Any = None, *, micro_batch_size: int, sample_weight: Any = None) -> Verification:
    """Compares the micro-batched gradient of a batch with the full-batch one.

    Nothing is trained: no weight, statistic, metric or seed changes. Layers that draw random numbers (dropout)
    run as in inference, since pieces draw other numbers than the whole batch.

    Args:
        model: A compiled model.
        x: Inputs of one batch, small enough to run whole.
        y: Targets.
        micro_batch_size: Samples at a time; fewer than the batch has.
        sample_weight: Weights of the samples.

    Returns:
        A `Verification`: `exact` or what breaks it, and the difference per variable. True when exact.

    Example:

    ```python
    print(oomproof.verify(model, x[:32], y[:32], micro_batch_size=8))
    ```
    """
    backend = backends.current()
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
    step = backend.step(model)
    step.prepare(data, "train")
    with without_randomness(model) as random:
        whole_loss, whole = step.gradients(data, 1)
        split_loss, split = step.gradients(data, pieces)
        tolerance = _tolerance(model)
        names = [variable.path for variable in model.trainable_variables]
        # A gradient that is zero but for rounding is not held to its own size.
        floor = 1e-5 * max((float(np.max(np.abs(g), initial=0.0)) for g in whole if g is not None), default=0.0)
        differences = sorted(
            (_difference(*three, floor) for three in zip(names, whole, split, strict=True)),
            key=lambda difference: -difference.relative,
        )
        loss = abs(whole_loss - split_loss) / max(abs(whole_loss), 1e-12)
        exact = loss <= tolerance and all(difference.relative <= tolerance for difference in differences)
        blamed: list[str] = []
        if not exact:
            blamed = _blame(backend, step, model, data, piece_bounds(batch_size, pieces), tolerance)
    notes = list(step.notes())
    if random:
        notes.append(f"compared without the randomness of {', '.join(random)}")
    return Verification(
        exact=exact,
        batch_size=batch_size,
        micro_batch_size=largest_piece(batch_size, pieces),
        tolerance=tolerance,
        loss=loss,
        differences=tuple(differences),
        culprits=tuple(blamed),
        notes=tuple(notes),
    )


def _tolerance(model: Any) -> float:
    """Rounding of the coarsest precision the model computes in, with room for sums in another order."""
    precisions = {layer.compute_dtype for layer in model._flatten_layers()}
    if precisions & {"float16", "bfloat16"}:
        return 5e-2
    return 1e-9 if precisions <= {"float64", None} else 2e-4


def _difference(name: str, whole: Any, split: Any, floor: float) -> Difference:
    if whole is None or split is None:
        same = whole is None and split is None
        return Difference(name, 0.0 if same else float("inf"), 0.0 if same else float("inf"))
    absolute = float(np.max(np.abs(whole - split), initial=0.0))
    scale = max(float(np.max(np.abs(whole), initial=0.0)), floor, 1e-30)
    return Difference(name, absolute, absolute / scale)


def _blame(backend: Any, step: Any, model: Any, data: Any, bounds: Any, tolerance: float) -> list[str]:
    """Names what differs: layers seen to mix samples, then losses that cannot be put together."""

    def layer_calls(batch: Any) -> Any:
        with outputs_recorded(model) as seen, backend.nothing_written(model):
            call(model, batch[0], True)
        return seen

    whole = layer_calls(data)
    pieces = [layer_calls(backend.part_of(data, start, stop)) for start, stop in bounds]
    found = [f"layer {name}, which mixes the samples of a batch" for name in culprits(whole, pieces, tolerance)]
    named = " ".join(found)
    found += [
        f"layer BatchNormalization {layer.path!r}, which normalises with the statistics of the batch"
        for layer in statistics_layers(model)
        if (layer.path or layer.name) not in named
    ]
    if not found:
        found = list(step.caveats(data)) or ["the loss, or something outside of any layer, that mixes the samples"]
    return found
