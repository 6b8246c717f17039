"""Scores explanations against labelled cases: precision and recall per field.

    python benchmarks/explain/score.py [--show]

All cases but those in cases-held-out.jsonl were looked at while patterns were written. Those in
cases-held-out.jsonl were not: 64 were written before any pattern, 24 before the second round of them. Their first
scores are in results/explain-first-sight.json. `--show` prints what was missed among the cases that may be looked at.
"""

from __future__ import annotations

import json
import pathlib
import sys
from typing import Any

HERE = pathlib.Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

import oomproof  # noqa: E402
from _common import write_result  # noqa: E402

FIELDS = (
    "is_memory",
    "memory",
    "raised_by",
    "requested_bytes",
    "tensor_shape",
    "dtype",
    "op",
    "layer",
    "cause",
)
SETS = {
    "tuned": (
        "cases-tuned.jsonl",
        "cases-produced.jsonl",
        "cases-produced-gpu.jsonl",
        "cases-independent.jsonl",
        "cases-independent-2.jsonl",
    ),
    "held_out": ("cases-held-out.jsonl",),
}
# "36.5 GiB" in a text is rounded.
_ROUNDED = 0.01


def cases(*names: str) -> list[dict[str, Any]]:
    return [json.loads(line) for name in names for line in (HERE / name).read_text().splitlines()]


def agrees(field: str, found: Any, expected: Any) -> bool:
    if field == "requested_bytes" and found and expected:
        return bool(abs(found - expected) <= _ROUNDED * expected)
    if field == "tensor_shape":
        return (list(found) if found else None) == (list(expected) if expected else None)
    return bool(found == expected)


def scored(given: list[dict[str, Any]], show: bool) -> dict[str, Any]:
    counts = {field: {"cases": 0, "right": 0, "said": 0, "said_right": 0} for field in FIELDS}
    for case in given:
        answer = oomproof.explain(case["text"].encode())
        for field, expected in case["expected"].items():
            found, count = getattr(answer, field), counts[field]
            right = agrees(field, found, expected)
            count["cases"] += expected is not None
            count["right"] += right and expected is not None
            count["said"] += found is not None
            count["said_right"] += right and found is not None
            if show and not right:
                print(f"{case['name']}: {field} is {found!r}, expected {expected!r}")
    return {
        field: {
            "cases": count["cases"],
            "recall": round(count["right"] / count["cases"], 4) if count["cases"] else None,
            "precision": round(count["said_right"] / count["said"], 4) if count["said"] else None,
        }
        for field, count in counts.items()
    }


def main() -> None:
    show = "--show" in sys.argv
    figures: dict[str, Any] = {"command": "python benchmarks/explain/score.py"}
    for name, files in SETS.items():
        given = cases(*files)
        figures[name] = {"cases": len(given), "fields": scored(given, show and name != "held_out")}
    write_result("explain", figures)


if __name__ == "__main__":
    main()
