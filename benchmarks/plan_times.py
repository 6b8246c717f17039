"""Is the plan that is chosen as fast as the best there is? A few models at parts of their plain peak, beside a grid.

    KERAS_BACKEND=torch python benchmarks/plan_times.py --total-s 500 --out points.jsonl                # on a GPU
    KERAS_BACKEND=jax python benchmarks/plan_times.py --levels 2 --micros 1,4 --out points.jsonl        # each compiles
    KERAS_BACKEND=torch python benchmarks/plan_times.py --tiny              # on a CPU, to see that it runs

For each model, in a process of its own: the plain step is measured, `oomproof.plan` is asked for parts of its peak, and
what it answers is timed beside every point of a grid, pieces × sets of segments to recompute. The sets are none, the
planner's own answers for some caps between the smallest peak and the plain one, the set with the smallest peak, and
everything. They are computed once per model, for the whole batch: for pieces the same sets are taken.

A peak is all that is in use at the worst moment of a step: weights, optimizer and batch included, which is what a
budget counts. (On JAX: what is in use between steps, and what the compiled programs need by XLA's own plan.) Nothing is
capped, so that points that do not fit are timed too and count for the budgets they fit.

Cutting the batch of a model with BatchNormalization changes its results, so its grid is that of recomputation alone;
where the plan cuts all the same, that is the only point in pieces, and its cell says "not exact".

The ratio of a cell is the time of the chosen plan over that of the fastest point of the grid whose measured peak is
within the budget. Below 1: nothing on the grid is as fast. A chosen plan that is on the grid is measured once.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import threading
import time

from _plan_points import Points, Record, key_of

MODELS = ("encoder", "vision_transformer", "plain_cnn", "residual_batchnorm")
SHARES = (0.75, 0.5, 0.25)
MICROS = (1, 2, 4, 8, 16)
# How long a process may be over its time before it is ended: the point it is at, and a compile that takes its time.
_GRACE = 60


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="small models on the CPU; the figures mean nothing")
    parser.add_argument("--models", default=",".join(MODELS), help="single-input models of the zoo")
    parser.add_argument("--shares", default=",".join(map(str, SHARES)), help="of the plain measured peak")
    parser.add_argument("--micros", default=",".join(map(str, MICROS)), help="in how many pieces, for the grid")
    parser.add_argument("--levels", type=int, default=4, help="sets to recompute besides none and everything")
    parser.add_argument("--steps", type=int, default=8, help="that are timed, after two that are not")
    parser.add_argument("--compile-s", type=float, default=20, help="points whose first step takes longer are skipped")
    parser.add_argument("--total-s", type=float, default=3600, help="no point is begun after this; models share it")
    parser.add_argument("--out", type=pathlib.Path, help="also append each measurement to this file as it comes")
    parser.add_argument("--name", help="of the result; plan-times-gpu-BACKEND otherwise")
    chosen = parser.parse_args()
    from _common import environment, write_result

    if not chosen.tiny and environment()["gpu"] is None:
        print("needs a GPU; --tiny shows that it runs", file=sys.stderr)
        return
    backend = os.environ.get("KERAS_BACKEND", "tensorflow")
    end = time.monotonic() + chosen.total_s
    models = chosen.models.split(",")
    records: list[Record] = []
    for at, model in enumerate(models):
        seconds = max(0.0, end - time.monotonic()) / (len(models) - at)
        if seconds < 1:
            records.append({"model": model, "what": "error", "error": "no time was left"})
            continue
        _child(chosen, backend, model, seconds, records)
        cells = [cell for name in models for cell in _cells([r for r in records if r["model"] == name])]
        write_result(
            chosen.name or f"plan-times-{'tiny' if chosen.tiny else 'gpu'}-{backend}",
            {
                "command": " ".join([f"KERAS_BACKEND={backend}", "python", "benchmarks/plan_times.py", *sys.argv[1:]]),
                "records": records,
                "cells": cells,
                "summary": _summary(cells),
            },
        )


def _child(chosen: argparse.Namespace, backend: str, model: str, seconds: float, records: list[Record]) -> None:
    """Runs a model in a process of its own, and takes its measurements as they come."""
    options = {**vars(chosen), "model": model, "seconds": seconds, "out": None}
    env = {**os.environ, "KERAS_BACKEND": backend, "TF_CPP_MIN_LOG_LEVEL": "3", "PYTHONUNBUFFERED": "1"}
    if chosen.tiny:
        env |= {"TF_CPU_ALLOCATOR_USE_BFC": "true", "TF_CPU_BFC_MEM_LIMIT_IN_MB": "4096", "TF_ENABLE_ONEDNN_OPTS": "0"}

    def note(record: Record) -> None:
        records.append({"model": model, **record})
        if chosen.out:
            with chosen.out.open("a") as file:
                file.write(json.dumps({"backend": backend, **records[-1]}) + "\n")
        print(records[-1], file=sys.stderr, flush=True)

    with tempfile.TemporaryFile("w+", errors="replace") as errors:
        command = [sys.executable, __file__, "--child", json.dumps(options)]
        child = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=errors, text=True)
        assert child.stdout is not None
        end = time.monotonic() + seconds + _GRACE
        timer = threading.Timer(seconds + _GRACE, child.kill)
        timer.start()
        try:
            for line in child.stdout:
                if line.startswith("{"):  # Frameworks print, too.
                    note(json.loads(line))
            code = child.wait()
        finally:
            timer.cancel()
            child.kill()
        if code:
            errors.seek(0)
            said = "\n".join(errors.read().strip().splitlines()[-6:])[-1200:]
            late = time.monotonic() > end
            note({"what": "error", "error": "ended by us: over its time" if late else f"ended with {code}: {said}"})


# What was found


def _cells(records: list[Record]) -> list[Record]:
    """For each share of a model: the plan, and the best of the grid within its budget."""
    points = {key_of(record): record for record in records if record["what"] == "point"}
    timed = [point for point in points.values() if "seconds" in point]
    plain = next((record for record in records if record["what"] == "plain"), {})
    cells = []
    for plan in records:
        if plan["what"] != "plan":
            continue
        cell = {name: plan[name] for name in ("model", "share", "budget")} | {"plain_seconds": plain.get("seconds")}
        cells.append(cell)
        # Where peaks cannot be read everything counts as fitting.
        fitting = [p for p in timed if p["on_grid"] and (p["peak"] is None or p["peak"] <= plan["budget"])]
        best = min(fitting, key=lambda point: point["seconds"], default=None)
        cell["grid_points"], cell["grid_points_that_fit"] = sum(p["on_grid"] for p in timed), len(fitting)
        if best is not None:
            cell["best"] = {name: best[name] for name in ("level", "micro", "seconds", "peak")}
            cell["best_peak_over_budget"] = _over(best["peak"], plan["budget"])
        if "sentence" not in plan:
            cell["no_plan"] = plan.get("cannot_fit") or plan.get("error")
            continue
        cell["plan"] = plan["sentence"]
        cell["memory_bound"] = bool(plan["recompute"]) or plan["micro"] < plan["batch"]
        mine = points.get(key_of(plan), {})
        if "seconds" not in mine:
            cell["plan_not_timed"] = mine.get("oom") or mine.get("error") or "no time was left"
            continue
        cell |= {
            "plan_seconds": mine["seconds"],
            "plan_peak": mine["peak"],
            "peak_over_budget": _over(mine["peak"], plan["budget"]),
            "predicted_over_peak": _over(plan["predicted"], mine["peak"]),
            "time_vs_plain": _over(mine["seconds"], plain.get("seconds")),
            "predicted_time_vs_plain": plan["relative_time"],
            "exact": not plan["caveats"],
            "ratio": None if best is None else mine["seconds"] / best["seconds"],
        }
    return cells


def _over(a: float | None, b: float | None) -> float | None:
    return a / b if a is not None and b else None


def _summary(cells: list[Record]) -> Record:
    ratios = [cell["ratio"] for cell in cells if cell.get("ratio") is not None]
    kept = [c["ratio"] for c in cells if c.get("ratio") is not None and (c["peak_over_budget"] or 0) <= 1]
    bound = [c["peak_over_budget"] for c in cells if c.get("memory_bound") and c.get("peak_over_budget") is not None]
    return {
        "cells": len(cells),
        "compared": len(ratios),
        "median_ratio": statistics.median(ratios) if ratios else None,
        "worst_ratio": max(ratios, default=None),
        "share_within_10_percent": sum(ratio <= 1.1 for ratio in ratios) / len(ratios) if ratios else None,
        "compared_and_within_budget": len(kept),
        "median_ratio_within_budget": statistics.median(kept) if kept else None,
        "worst_ratio_within_budget": max(kept, default=None),
        "memory_bound": len(bound),
        "median_peak_over_budget_of_memory_bound": statistics.median(bound) if bound else None,
        "above_budget": sum((cell.get("peak_over_budget") or 0) > 1 for cell in cells),
        "no_plan": sum("no_plan" in cell for cell in cells),
        "plan_not_timed": sum("plan_not_timed" in cell for cell in cells),
    }


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        Points(json.loads(sys.argv[2])).run()
    else:
        main()
