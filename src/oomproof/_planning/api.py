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
    """Says how a batch can be trained within a budget at the least cost in time. The GPU need not be there.

    Args:
        model: A compiled Keras model. It stays as it was; one that is not built yet is built.
        batch_size: Samples in a batch.
        budget: Memory to stay below: bytes, `"12GiB"`, or a share of the card such as `"90%"`; what the framework can
            use of the card when left out.
        gpu: A card of the catalogue, such as `"rtx-3060"`; the one in this machine when nothing is named.
        memory: The memory of a card that is not in the catalogue, in bytes or as `"24GiB"`.
        allow: `"default"`, `"exact"`, or a set of `"microbatch"`, `"recompute"`, `"xla"`, `"mixed_precision"` and
            `"batch_statistics"`.
        input_shape: As for `estimate`.
        cache: Look up and remember plans on disk.

    Returns:
        A `Plan`. Printed, it is a table of alternatives; `fit(..., plan=...)` follows it.

    Raises:
        CannotFitError: When nothing that is allowed fits. It says what comes closest.
        TypeError, ValueError: For arguments that make no sense, shapes that are open, a card that is not known.
        UnsupportedModelError: For a model whose training cannot be taken over.

    Example:
        >>> p = oomproof.plan(model, 1024, gpu="rtx-3060")
        >>> oomproof.fit(model, x, y, batch_size=1024, plan=p)
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
    workload = describe(
        model, batch_size, "train", is_compiled(model, backend), Target(True, card.capability), input_shape
    )
    workload = dataclasses.replace(workload, guarded=True)
    return Planner(backend, model, levers, named_levers=not isinstance(allow, str), cache=cache).make(workload, limit)


def _share(budget: int | str) -> bool:
    return isinstance(budget, str) and budget.strip().endswith("%")
