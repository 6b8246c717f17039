"""`estimate` and `max_batch_size`: from a model and a batch size to figures a user can act on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from oomproof._backends.common.model import check_is_model
from oomproof._estimation.cards import card_of
from oomproof._estimation.estimating import Asked, estimated
from oomproof._estimation.search import largest
from oomproof._estimation.workloads import InputShape, check_batch_size
from oomproof._records.estimate import Estimate
from oomproof._records.run import Phase
from oomproof._records.units import format_bytes
from oomproof.errors import CannotFitError


def estimate(
    model: Any,
    batch_size: int,
    *,
    gpu: str | None = None,
    memory: int | str | None = None,
    engine: str = "auto",
    phase: Phase = "train",
    precision: str | None = None,
    micro_batch_size: int | None = None,
    jit: bool | None = None,
    input_shape: InputShape = None,
    recompute: Sequence[str] = (),
) -> Estimate:
    """Estimates how much memory a step takes, without running it. You don't need the GPU.

    Args:
        model: A Keras model, compiled unless `phase` is `"predict"`. It is built if it is not yet, and stays as it is
            otherwise.
        batch_size: Samples in a batch.
        gpu: A card of the catalogue, such as `"rtx-4090"`; `oomproof gpus` lists them. By default, the one in this
            machine.
        memory: The memory of a card that is not in the catalogue: bytes or `"24GiB"`.
        engine: `"trace"` follows the step on shapes, `"compile"` asks XLA, `"probe"` runs small steps on the device in
            this machine. `"auto"` takes the most exact one that works here and runs nothing.
        phase: `"train"`, `"test"` (evaluate) or `"predict"`.
        precision: A dtype policy to use instead of the model's, such as `"mixed_bfloat16"`.
        micro_batch_size: The most samples to run at a time, as for `guard`. By default, batches run whole.
        jit: Whether the step is compiled. By default, as Keras decides on a machine with that GPU.
        input_shape: The shape of a sample, where the model leaves it open: a tuple, a list of tuples for several
            inputs, or a dict by name. A dtype may come last: `(128, "int32")`.
        recompute: Segments of the model that are computed again in the backward pass, as in `Plan.recompute`.

    Returns:
        An `Estimate`. It prints as a table.

    Raises:
        UnsupportedModelError: If the model cannot be traced.
        BackendError: If the engine cannot be used here.
        TypeError: If an argument is of the wrong type.
        ValueError: If an argument is out of range, a shape is open, or the card is not known.

    Example:

    ```python
    estimate = oomproof.estimate(model, 256, gpu="a100-40gb")
    print(estimate)
    estimate.fits, estimate.by_layer[:5]
    ```
    """
    check_batch_size(batch_size)
    check_model(model, phase)
    if micro_batch_size is not None:
        check_batch_size(micro_batch_size, "micro_batch_size")
    asked = Asked(
        model, gpu, memory, engine, phase, precision, jit, input_shape, micro_batch_size, recompute=tuple(recompute)
    )
    return estimated(asked, batch_size)[0]


def max_batch_size(
    model: Any,
    *,
    gpu: str | None = None,
    memory: int | str | None = None,
    engine: str = "auto",
    phase: Phase = "train",
    precision: str | None = None,
    jit: bool | None = None,
    input_shape: InputShape = None,
) -> int:
    """Finds the largest batch that fits on a card, even if its step needs as much as the estimate says at most.

    Args:
        model: As for `estimate`.
        gpu: As for `estimate`.
        memory: As for `estimate`.
        engine: As for `estimate`.
        phase: As for `estimate`.
        precision: As for `estimate`.
        jit: As for `estimate`.
        input_shape: As for `estimate`.

    Returns:
        Samples in the batch.

    Raises:
        CannotFitError: If not even one sample fits.
        UnsupportedModelError: If the model cannot be traced.
        BackendError: If the engine cannot be used here.
        TypeError: If an argument is of the wrong type.
        ValueError: If an argument is out of range, a shape is open, or no card is known.

    Example:

    ```python
    oomproof.max_batch_size(model, gpu="rtx-4090")
    ```
    """
    card = card_of(gpu, memory)
    if card is None:
        raise ValueError('Expected a card to fit into: gpu="rtx-4090" or memory="24GiB". This machine has none.')

    check_model(model, phase)
    asked = Asked(model, gpu, memory, engine, phase, precision, jit, input_shape)
    first, settled = estimated(asked, 1)
    assert first.limit is not None
    if not first.fits:
        raise CannotFitError(
            f"One sample at a time needs {format_bytes(first.expected)}, up to {format_bytes(first.high)}, and "
            f"{format_bytes(first.limit)} can be used on {first.gpu}. Largest: "
            + ", ".join(f"{name} {format_bytes(size)}" for name, size in list(first.by_category.items())[:3])
            + ". Use an optimizer with less state, a smaller model or inputs, or a card with more memory."
        )

    def need(batch_size: int) -> int:
        found, known = estimated(asked, batch_size)
        return found.expected if known else found.high

    return largest(need, first.limit, first.expected if settled else first.high)


def check_model(model: Any, phase: str) -> None:
    check_is_model(model)
    if phase not in ("train", "test", "predict"):
        raise ValueError(f'Expected `phase` to be "train", "test" or "predict". Received: phase={phase!r}')
    if phase != "predict" and not model.compiled:
        raise ValueError(
            f"{model.name} is not compiled, so its optimizer and its loss are not known. Call `model.compile(...)` "
            'first, or estimate with phase="predict".'
        )
