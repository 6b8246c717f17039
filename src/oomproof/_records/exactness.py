"""Is training in pieces, or with recomputed segments, the same as plain training? There are three answers.

*exact* is only said where it was proven: see `oomproof._backends.common.proof`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, Self, get_args

from oomproof._records.record import Record

Word = Literal["exact", "exact but for random numbers", "not exact"]


@dataclasses.dataclass(frozen=True)
class Exactness(Record):
    """How a run relates to the same run on a device with unlimited memory.

    Attributes:
        word: `"exact"`: the same up to rounding, proven on this model and its data. `"exact but for random numbers"`:
            the same, but pieces draw other random numbers than the whole batch. `"not exact"`: different, or not proven
            to be the same.
        why: The reasons; empty when exact.
    """

    word: Word = "exact"
    why: tuple[str, ...] = ()

    @property
    def holds(self) -> bool:
        """Whether it is exact, or exact but for random numbers."""
        return self.word != "not exact"

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Makes a record of what `to_dict` returned."""
        # Nothing is exact because nothing is said of it.
        return super().from_dict({"word": data["word"], **data})

    def __str__(self) -> str:
        if not self.why:
            return self.word
        return f"{self.word}: {'; '.join(self.why)}" if not self.holds else f"{self.word} ({'; '.join(self.why)})"


def worse(first: Exactness, second: Exactness) -> Exactness:
    """What holds of a run that was partly the one and partly the other."""
    words = get_args(Word)
    word = max(first.word, second.word, key=words.index)
    why = [reason for each in (first, second) if each.word == word for reason in each.why]
    return Exactness(word, tuple(dict.fromkeys(why)))
