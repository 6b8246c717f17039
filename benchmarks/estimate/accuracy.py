"""How good estimates are, from pairs of estimate and truth. Imports no framework.

An error is estimate / truth − 1. Percentiles are by nearest rank: the smallest value that at least so many are below or
equal to, so that the figure is always one that was seen.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from typing import Any

Rows = list[dict[str, Any]]


def truth_of(row: dict[str, Any]) -> dict[str, Any]:
    """What a run says: its peak in bytes, or in `outcome` why there is none."""
    if row["outcome"] != "finished":
        return {"outcome": row["outcome"], "truth": None}
    peaks = [row[key]["peak"] for key in ("first", "later") if row.get(key)]
    if not peaks or None in peaks:
        return {"outcome": "not measured", "truth": None}
    if row["stack"].startswith("tensorflow") and len(peaks) > 1:
        # In its first step TensorFlow looks for the quickest kernels, with as much memory as it finds (4 GiB at most
        # for each try) and with less where there is less: tight.py runs the step without that room.
        return {"outcome": "finished", "truth": peaks[-1], "with_search": max(peaks)}
    # JAX cannot forget a peak: one that was reached while the model was built says nothing about a step.
    if row["stack"] == "jax" and max(peaks) <= row["built"]["peak"]:
        return {"outcome": "peak before fit", "truth": None}
    return {"outcome": "finished", "truth": max(peaks)}


def latest(rows: Iterable[dict[str, Any]]) -> Rows:
    """One row for each run: the last, but one that finished before any that did not."""
    found: dict[str, dict[str, Any]] = {}
    for row in rows:
        if row["outcome"] == "finished" or found.get(row["id"], {}).get("outcome") != "finished":
            found[row["id"]] = row
    return list(found.values())


def case(run: dict[str, Any], row: dict[str, Any] | None, answer: dict[str, Any]) -> dict[str, Any]:
    """A run of the design beside its estimate.

    Args:
        run: The run.
        row: What was measured, or `None` where it was not run.
        answer: `low`, `expected`, `high`, `named` (the share of its bytes that is on named layers) and `seconds`;
            or `failed`, why there is no estimate; or nothing, where none was asked for.
    """
    found = {key: run[key] for key in ("id", "model", "family", "kind", "half", "stack", "precision", "batch")}
    found |= {"outcome": "not run", "truth": None} if row is None else truth_of(row)
    found |= answer
    compared = found["truth"] is not None and "expected" in answer
    return found | {"error": answer["expected"] / found["truth"] - 1 if compared else None}


def figures(cases: Rows) -> dict[str, Any]:
    """What is said about a set of cases: how many there are, how many count, and how far off those are."""
    scored = [case for case in cases if case["error"] is not None]
    counts = {
        "runs": len(cases),
        "scored": len(scored),
        "without_truth": _counted(case["outcome"] for case in cases if case["truth"] is None),
        "without_estimate": sum(case["truth"] is not None for case in cases) - len(scored),
    }
    if not scored:
        return counts
    sizes = [abs(case["error"]) for case in scored]
    return counts | {
        "median_absolute_error": statistics.median(sizes),
        "95th_percentile_of_absolute_error": percentile(sizes, 0.95),
        "median_error": statistics.median(case["error"] for case in scored),
        "share_with_truth_above_high": _share(case["truth"] > case["high"] for case in scored),
        "share_with_truth_below_low": _share(case["truth"] < case["low"] for case in scored),
        "median_high_over_expected": statistics.median(case["high"] / case["expected"] for case in scored),
        "median_share_on_named_layers": statistics.median(case["named"] for case in scored),
        "median_seconds": statistics.median(case["seconds"] for case in scored),
        "worst": max(scored, key=lambda case: abs(case["error"]))["id"],
    }


def by_stack(cases: Rows, half: str) -> dict[str, Any]:
    """The figures of one half: all of it, and for each stack."""
    mine = [case for case in cases if case["half"] == half]
    stacks = list(dict.fromkeys(case["stack"] for case in mine))
    return {"all": figures(mine)} | {stack: figures([c for c in mine if c["stack"] == stack]) for stack in stacks}


def percentile(values: list[float], share: float) -> float:
    """The smallest of the values that at least this share of them does not exceed."""
    return sorted(values)[max(0, math.ceil(share * len(values) - 1e-9) - 1)]


def named_share(by_layer: Iterable[tuple[str, int]]) -> float:
    """The part of the bytes that is on layers with a name."""
    sizes = list(by_layer)
    whole = sum(size for _, size in sizes)
    return sum(size for path, size in sizes if path) / whole if whole else 0.0


def _share(answers: Iterable[bool]) -> float:
    found = list(answers)
    return sum(found) / len(found)


def _counted(values: Iterable[str]) -> dict[str, int]:
    found: dict[str, int] = {}
    for value in values:
        found[value] = found.get(value, 0) + 1
    return found
