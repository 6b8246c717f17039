"""What a log shows besides failures: how far training had come, and whether it took more and more memory."""

from __future__ import annotations

import re

from oomproof._explain.pattern import parse_size

_WORDS = ("epoch", "step", "iter", "loss", "it/s", "s/it", "eta")
_TRAINING = ("loss", "epoch", "train")
_EPOCH = re.compile(r"\bepoch[\s:=#\[(]*(\d{1,7})", re.IGNORECASE)
_STEP = re.compile(r"\b(?:global_?step|steps?|iter(?:ation)?s?|it)[\s:=#\[(]*(\d{1,9})\b", re.IGNORECASE)
_BAR = re.compile(r"(?:^|\s|\||\[)(\d{1,9})/(\d{1,9})\]?\s*(?:\[|━|-|\x20?.{0,60}(?:loss|/step|it/s))")
# Steps that are to come, or that another run made.
_NOT_MADE = re.compile(r"--\w|\bpython\d?\b|\btotal\b|\b(?:max|num)[_ ]|resum|loaded|restor", re.IGNORECASE)
# What stands beside a step that was made. Where nothing does, it takes a second one.
_BESIDE = ("loss", "it/s", "s/it", "/step", "acc", "eta", "lr", "time", "ms")
# What is only said when all went well.
_DONE = re.compile(
    r"\b(?:done training|training (?:is )?(?:done|complete[d]?|finished)|finished training|model saved|saved (?:the )?"
    r"(?:model|checkpoint|weights)|saving (?:model|checkpoint) to)\b",
    re.IGNORECASE,
)
_FIGURE = re.compile(
    r"\b(?:gpu[_ ]?mem\w*|max[_ ]?mem\w*|mem(?:ory)?\w*|rss|vram|ram|\w*alloc\w*|maxrss)\b[^\d\n]{0,24}"
    r"(\d+(?:\.\d+)?)\s*([KMGT])i?B?\b",
    re.IGNORECASE,
)
# Fewer figures, or less growth, are no sign of a leak.
_FIGURES = 4
_GROWTH = 1.15


class Progress:
    """Counts of what was seen so far."""

    def __init__(self) -> None:
        self.epoch = 0
        self.step = 0
        self.count = 0
        self._last: tuple[int, ...] = ()
        self._alone = 0
        self._first_figure = self._last_figure = 0
        self._figures = self._rises = 0
        self.figures: list[tuple[int, str]] = []

    def read(self, line: str, lowered: str) -> bool:
        """Whether the line shows that training went on."""
        if not any(word in lowered for word in _WORDS):
            return False
        found = [pattern.search(line) for pattern in (_EPOCH, _STEP, _BAR)]
        if not any(found):
            return False
        if _NOT_MADE.search(line) and "loss" not in lowered:
            return False
        epoch, step, bar = (int(match[1]) if match else 0 for match in found)
        if step and not any(word in lowered for word in _BESIDE):
            # A setting stays as it is.
            rises = 0 < self._alone < step
            self._alone = step
            step = step if rises else 0
        now = (epoch, step, bar)
        if now == self._last:
            return False
        self._last = now
        self.count += 1
        self.epoch = max(self.epoch, epoch)
        # Downloads, tokenizers and predictions have bars, too.
        self.step = max(self.step, step, bar if any(word in lowered for word in _TRAINING) else 0)
        return True

    @staticmethod
    def is_done(line: str, lowered: str) -> bool:
        """Whether the line says that training came to its end, or that its result was saved."""
        return ("sav" in lowered or "training" in lowered) and _DONE.search(line) is not None

    def read_figure(self, number: int, line: str, lowered: str) -> None:
        """Notes how much memory is said to be in use, if that is said."""
        if "mem" not in lowered and "rss" not in lowered and "ram" not in lowered and "alloc" not in lowered:
            return
        found = _FIGURE.search(line)
        size = parse_size(f"{found[1]}{found[2]}") if found else None
        if not size:
            return
        self._figures += 1
        self._rises += size > self._last_figure and self._figures > 1
        self._first_figure = self._first_figure or size
        self._last_figure = size
        # The first and the last, to be shown.
        del self.figures[1:]
        self.figures.append((number, line))

    @property
    def grew(self) -> tuple[int, int] | None:
        """(first, last) figure of a use of memory that kept growing, or `None`."""
        steady = self._figures >= _FIGURES and self._rises >= 0.75 * (self._figures - 1)
        if steady and self._last_figure >= _GROWTH * self._first_figure:
            return self._first_figure, self._last_figure
        return None

    @property
    def fitted_before(self) -> bool:
        """Whether steps like the one that failed had gone through for a while."""
        return self.epoch >= 2 or self.step >= 100
