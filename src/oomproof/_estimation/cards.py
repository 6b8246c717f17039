"""The card a step is estimated for, and how much of it there is."""

from __future__ import annotations

from oomproof._backends.base import Backend
from oomproof._machine import gpus
from oomproof._records.units import format_bytes

_LEAST_CARD = 2**20


def card_of(gpu: str | None, memory: int | str | None) -> gpus.Gpu | None:
    if gpu is not None and memory is not None:
        raise ValueError(f"Expected `gpu` or `memory`, not both. Received: gpu={gpu!r}, memory={memory!r}")
    if memory is not None:
        return _card_with(memory)
    return gpus.find(gpu) if gpu is not None else gpus.local()


def _card_with(memory: int | str) -> gpus.Gpu:
    wrong = f'Expected `memory` to be the memory of a card, such as "24GiB". Received: memory={memory!r}'
    try:
        card = gpus.of_memory(memory)
    except ValueError as error:
        raise ValueError(wrong) from error
    if card.memory < _LEAST_CARD:
        # "24" is 24 bytes, and hardly meant.
        raise ValueError(f"{wrong}, which is {format_bytes(card.memory)}")
    return card


def limit_of(card: gpus.Gpu, backend: Backend, *, here: bool) -> int:
    """Bytes there are to fit into; on the card in this machine that may be less, by a limit or by other processes."""
    usable = card.usable(backend.name)
    limit = backend.memory().describe().limit if here else None
    return usable if limit is None else min(usable, limit)
