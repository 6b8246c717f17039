"""Is training in pieces, or with parts computed twice, the training that was asked for? Three words for it.

*exact* is said where it was seen: see `oomproof._backends.common.proof`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, get_args

Word = Literal["exact", "exact but for random numbers", "not exact"]


@dataclasses.dataclass(frozen=True)
class Exactness:
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

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Exactness:
        return cls(data["word"], tuple(data["why"]))

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
