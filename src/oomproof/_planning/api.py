"""`plan`: from a model and the memory there is to a way to run the batch that was asked for."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from oomproof._backends import current
from oomproof._estimation.api import check_model
from oomproof._estimation.cards import card_of
from oomproof._estimation.modes import is_compiled
from oomproof._estimation.workloads import InputShape, check_batch_size, describe
from oomproof._machine import gpus
from oomproof._planning.levers import allowed
from oomproof._planning.planner import Planner
from oomproof._records.plan import Plan
from oomproof._records.trace import Target
from oomproof._records.units import parse_budget
from oomproof._simulators import one_at_a_time


def plan(
    model: Any,
    batch_size: int,
    *,
    budget: int | str | None = None,
    gpu: str | None = None,
    memory: int | str | None = None,
    allow: str | Iterable[str] = "default",
    input_shape: InputShape = None,
    cache: bool = True,
) -> Plan:
    """Finds the fastest way to train a batch within a budget. You don't need the GPU.

    Args:
        model: A compiled Keras model. It is built if it is not yet, and stays as it is otherwise.
        batch_size: Samples in a batch.
        budget: The most memory to use: bytes, `"12GiB"`, or a share of the card such as `"90%"`. By default, all that
            the framework can use of the card.
        gpu: A card of the catalogue, such as `"rtx-3060"`. By default, the one in this machine.
        memory: The memory of a card that is not in the catalogue: bytes or `"24GiB"`.
        allow: What may be done so that a batch fits. As for `guard`.
        input_shape: As for `estimate`.
        cache: Whether to look up plans on disk, and keep them there.

    Returns:
        A `Plan`. It prints as a table of alternatives. `fit(..., plan=...)` follows it.

    Raises:
        CannotFitError: If nothing that is allowed fits. It says what comes closest.
        UnsupportedModelError: If the model has its own `train_step`, or cannot be traced.
        TypeError: If an argument is of the wrong type.
        ValueError: If an argument is out of range, a shape is open, or no card is known.

    Example:

    ```python
    plan = oomproof.plan(model, 1024, gpu="rtx-3060")
    print(plan)
    oomproof.fit(model, x, y, batch_size=1024, plan=plan)
    ```
    """
    check_batch_size(batch_size)
    check_model(model, "train")
    backend = current()
    backend.check_model(model)
    levers = allowed(allow)
    # A budget by itself is as good as a card.
    card = card_of(gpu, memory) or (gpus.of_memory(budget) if budget is not None and not _share(budget) else None)
    if card is None:
        raise ValueError(
            'Expected something to fit into: budget="12GiB", gpu="rtx-4090" or memory="24GiB". This machine has no GPU.'
        )
    usable = card.usable(backend.name)
    named = gpu is not None or memory is not None
    limit = usable if budget is None else parse_budget(budget, usable if named or _share(budget) else None)
    assert limit is not None
    planner = Planner(backend, model, levers, named_levers=not isinstance(allow, str), cache=cache)
    with one_at_a_time():
        target = Target(True, card.capability)
        workload = describe(model, batch_size, "train", is_compiled(model, backend), target, input_shape)
        return planner.make(dataclasses.replace(workload, guarded=True), limit)


def _share(budget: int | str) -> bool:
    return isinstance(budget, str) and budget.strip().endswith("%")
