"""When a proof is made, on how many samples, and what is remembered of it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

from oomproof._backends.base import DeviceMemory, Step
from oomproof._backends.pieces import largest_piece
from oomproof._records.exactness import Exactness
from oomproof._records.patience import PATIENCE, TookTooLongError, patience
from oomproof._training.helpers import in_a_line, optional
from oomproof._training.settings import Settings
from oomproof.errors import OomproofError

# Samples of a proof for batches that are cut, fewer where there may be no memory for so many.
_SAMPLES = (5, 3, 2)
# So many are tried whatever the size of pieces: with fewer, all pieces are of one size.
_FEWEST = 3
# Whether a segment is computed once or twice concerns every sample alike.
_SAMPLES_RECOMPUTED = (2, 1)
# At which batches data is looked at again. What was proven of an own loss may have been so for the data before.
_LOOKS = frozenset(2**power for power in range(1, 64))
# Whoever waited longer is told what for.
_LONG = 5.0
# Seconds that a proof may take where nothing is cut without it.
_UNTIL_PROVEN = 600.0

logger = logging.getLogger("oomproof")


class Proving:
    """Proofs for the steps of one model.

    Args:
        step: The step.
        memory: The memory it runs in.
        settings: What the user asked for.
        say: Tells the user something.
    """

    def __init__(
        self, step: Step, memory: DeviceMemory, settings: Settings, say: Callable[[str], None] = lambda message: None
    ) -> None:
        self._step = step
        self._memory = memory
        self._proofs = settings.proofs
        self._budget = settings.budget
        # Who allows what is exact alone cannot go on without a proof.
        self._seconds = _UNTIL_PROVEN if settings.exact_only else PATIENCE
        self._say = say

    def __call__(self, data: Any, pieces: int) -> Exactness:
        """What a step on this batch is, cut into pieces and with what is recomputed now."""
        cut = pieces > 1
        key = self._key(data, cut)
        found = self._recalled(key)
        if found is None:
            found = self._made(data, pieces)
            if key is not None and self._proofs is not None and found.holds:
                with optional("Remembering the proof"):
                    self._proofs.remember(key, {**found.to_dict(), "learnt": self._step.learnt})
        if cut and found.holds:
            # Data that the proof did not see may be of another kind: other masks, losses that were zero.
            found = self._tried(lambda: self._step.look(data, pieces, room=self._room())) or found
        return found

    def again(self, data: Any, pieces: int, number: int) -> Exactness | None:
        """What a step turns out to be at a later batch, the `number`th that is cut; `None` for no change."""
        if pieces == 1 or number not in _LOOKS:
            return None
        return self._tried(lambda: self._step.look(data, pieces, again=True, room=self._room()))

    def _room(self) -> int | None:
        """Bytes that are free, or `None` where nobody knows."""
        limits = [limit for limit in (self._memory.describe().limit, self._budget) if limit is not None]
        use = self._memory.usage()
        return None if not limits or use is None else min(limits) - use.current

    def of_predictions(self, data: Any) -> Exactness | None:
        """What pieces make of predictions where they are not those of the whole batch; `None` where nobody knows."""
        try:
            with patience():
                return self._step.look_at_predictions(data)
        except Exception as error:
            logger.debug(f"oomproof: Looking at predictions failed: {error!r}")
        self._memory.release()
        return None

    def _key(self, data: Any, cut: bool) -> str | None:
        """What the proof is remembered by; `None` where it is not."""
        if self._proofs is None:
            return None
        with optional("Looking for an earlier proof"):
            head = self._step.head
            return self._proofs.key(data, cut, self._step.recompute, None if head is None else head[0])
        return None

    def _recalled(self, key: str | None) -> Exactness | None:
        if key is None or self._proofs is None:
            return None
        with optional("Reading an earlier proof"):
            known = self._proofs.recall(key)
            if known is None:
                return None
            try:
                self._step.learnt = known["learnt"]
                return Exactness(known["word"], tuple(known["why"]))
            except (KeyError, TypeError, ValueError, AttributeError):
                pass  # Not what this version writes: prove it anew.
        return None

    def _made(self, data: Any, pieces: int) -> Exactness:
        piece = largest_piece(self._step.batch_size(data), pieces)
        cut = [count for count in _SAMPLES if count <= max(_FEWEST, piece)]
        in_pieces = pieces > 1 or self._step.head is not None
        began = time.perf_counter()
        with patience(self._seconds):
            for samples in cut if in_pieces else _SAMPLES_RECOMPUTED:
                found = self._tried(lambda samples=samples: self._step.prove(data, samples, pieces > 1))
                if found is not None:
                    if (seconds := time.perf_counter() - began) > _LONG:
                        self._say(f"Proving that this is the same training took {seconds:.0f} s; that is done once.")
                    return found
        return Exactness("not exact", ("there was too little memory to prove that it is",))

    def _tried(self, question: Any) -> Exactness | None:
        """The answer, or `None` where there is no memory to ask. What fails otherwise proves and breaks nothing."""
        try:
            with patience(self._seconds):
                answer: Exactness | None = question()
            return answer
        except OomproofError:
            raise  # A model that cannot be cut at all is refused, whatever is allowed.
        except TookTooLongError as error:
            return Exactness("not exact", (f"that was not proven, since {error}",))
        except Exception as error:
            if self._memory.shortage(error) is None:
                return Exactness("not exact", (f"the proof could not run ({in_a_line(error)})",))
        self._memory.release()
        return None
