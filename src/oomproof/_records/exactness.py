"""Is training in pieces, or with parts computed twice, the training that was asked for? Three words for it.

*exact* is said where it was seen: see `oomproof._backends.common.proof`.
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
        word: `"exact"`: proven here, on this model and its data, up to rounding. `"exact but for random numbers"`:
            likewise, but pieces draw other random numbers than the whole batch. `"not exact"`: it is not, or that could
            not be proven.
        why: What makes it so, in words; empty when exact.
    """

    word: Word = "exact"
    why: tuple[str, ...] = ()

    @property
    def holds(self) -> bool:
        """Whether it is exact, at least but for random numbers."""
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
