"""Does the plan that is made before the first step keep its promise? A zoo of models, each at parts of its plain peak.

    python benchmarks/plans.py                                              # TensorFlow's real allocator on the CPU
    KERAS_BACKEND=torch python benchmarks/plans.py --device gpu             # the same on a GPU, with larger models
    python benchmarks/plans.py --cells mlp:0.5,lstm:0.25 --out some.jsonl   # some of it, at the peaks that are known

For each model and budget a child process trains a few steps from cold under a limit that is real; how often memory ran
out is counted where the framework raises it, failed probes included. A second child trains without a limit and the
weights are compared. Plans are made anew each time, none is taken from the cache. Where a budget leaves no room beside
weights, slots and gradients, the planner says before the first step that more is needed than there is; `fit` tries all
the same and gives up. Such runs are refused: counted apart, and no success.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import functools
import json
import os
import pathlib
import sys
import tempfile
from typing import Any

from _plan_run import asked_of_child, trained

SHARES = (0.5, 0.25, 0.75)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--device", choices=("cpu", "gpu"), default="cpu")
    options.add_argument("--models", help="some of the zoo, with commas between them")
    options.add_argument("--shares", default=",".join(map(str, SHARES)))
    options.add_argument("--cells", help="model:share,…: only these, by the peaks of the last result; none is written")
    options.add_argument("--jobs", type=int, default=2)
    options.add_argument("--out", type=pathlib.Path, help="also append each answer to this file as it comes")
    options.add_argument("--read", type=pathlib.Path, help="run nothing, sum up what was written with --out")
    options.add_argument("--machine", type=pathlib.Path, help="with --read: a result from the machine it was run on")
    options.add_argument("--resume", type=pathlib.Path, help="written with --out: what is in it is not run again")
    options.add_argument("--jit", choices=("auto", "on", "off"), default="auto")
    chosen = options.parse_args()
    backend = os.environ.get("KERAS_BACKEND", "tensorflow")
    names = chosen.models.split(",") if chosen.models else list(zoo(chosen.device))
    shares = [float(share) for share in chosen.shares.split(",")]

    if chosen.cells:
        _some_cells(chosen, backend)
        return
    if chosen.read:
        told = [json.loads(line) for line in chosen.read.read_text().splitlines()]
        plain = {row["model"]: row for row in told if row["limit"] is None}
        runs = [row for row in told if row["limit"] is not None]
    else:
        plain, runs = _measured(chosen, backend, names, shares)
    for run in runs:
        run["share"] = round(run["limit"] / plain[run["model"]]["peak"], 3)
    # A process that ended without an answer says nothing about the plan; what it said instead is in its cell.
    answered = [run for run in runs if "error" not in run]
    finished = [run for run in answered if run.get("finished")]
    possible = [run for run in answered if not run.get("cannot_fit") and not is_refused(run)]
    from _common import write_result

    more = {"measured_on": json.loads(chosen.machine.read_text())["environment"]} if chosen.machine else {}
    write_result(
        f"plans-{chosen.device}-{backend}" + ("" if chosen.jit == "auto" else f"-jit-{chosen.jit}"),
        {
            "command": " ".join(["python", "benchmarks/plans.py", *sys.argv[1:]]),
            "runs": len(runs),
            "without_an_answer": len(runs) - len(answered),
            "finished": len(finished),
            "said_before_the_first_step_that_it_cannot_fit": len(answered) - len(possible),
            "refused": sorted(f"{run['model']} at {run['share']}" for run in answered if run not in possible),
            "share_without_a_failure": _share(possible, lambda run: run.get("finished") and run["failures"] == 0),
            "share_with_at_most_one_failure": _share(possible, lambda run: run.get("finished") and run["failures"] < 2),
            "median_peak_over_limit": _median([run["peak"] / run["limit"] for run in finished if run["peak"]]),
            "largest_weight_difference": max(
                (run["difference"] for run in finished if run["exact"] and run["difference"] is not None), default=None
            ),
            "plain": plain,
            "cells": runs,
            **more,
        },
    )


def zoo(device: str) -> dict[str, Any]:
    """What makes each model. A CPU has models of its own: small ones that have as much to plan."""
    if device == "cpu":
        from _plan_zoo_small import ZOO as SMALL

        return dict(SMALL)
    from _plan_zoo import ZOO

    return {name: functools.partial(make, True) for name, make in ZOO.items()}


def is_refused(run: dict[str, Any]) -> bool:
    """Whether it was said beforehand that it would not fit, and it did not."""
    return bool(run.get("cannot_fit") or (run.get("said_that_it_will_not_fit") and not run.get("finished")))


def _some_cells(chosen: Any, backend: str) -> None:
    path = pathlib.Path(__file__).parent / "results" / f"plans-{chosen.device}-{backend}.json"
    plain = json.loads(path.read_text())["plain"]
    cells = [(name, float(share)) for name, _, share in (cell.partition(":") for cell in chosen.cells.split(","))]
    with tempfile.TemporaryDirectory() as folder, concurrent.futures.ThreadPoolExecutor(chosen.jobs) as pool:
        ask = functools.partial(_asked, chosen, backend, folder)
        list(pool.map(lambda cell: ask(cell[0], int(plain[cell[0]]["peak"] * cell[1])), cells))


def _asked(chosen: Any, backend: str, folder: str, name: str, limit: int | None) -> dict[str, Any]:
    answer = _child(chosen, backend, folder, name, limit)
    if chosen.out:
        with chosen.out.open("a") as file:
            file.write(json.dumps(answer) + "\n")
    print(answer, file=sys.stderr, flush=True)
    return answer


def _measured(
    chosen: Any, backend: str, names: list[str], shares: list[float]
) -> tuple[dict[str, dict[str, Any]], list[dict[str, Any]]]:
    """(plain runs by model, runs in less memory)."""
    with tempfile.TemporaryDirectory() as folder, concurrent.futures.ThreadPoolExecutor(chosen.jobs) as pool:
        ask = functools.partial(_asked, chosen, backend, folder)
        told = [json.loads(line) for line in chosen.resume.read_text().splitlines()] if chosen.resume else []
        known = {(row["model"], row["limit"]): row for row in told if row.get("peak")}

        def found(name: str, limit: int | None) -> dict[str, Any]:
            return known.get((name, limit)) or ask(name, limit)

        plain = dict(zip(names, pool.map(lambda name: found(name, None), names), strict=True))
        cells = [(name, share) for share in shares for name in names if plain[name].get("peak")]
        return plain, list(pool.map(lambda cell: found(cell[0], int(plain[cell[0]]["peak"] * cell[1])), cells))


def _share(runs: list[dict[str, Any]], good: Any) -> float:
    return sum(bool(good(run)) for run in runs) / max(1, len(runs))


def _median(values: list[float]) -> float | None:
    return sorted(values)[len(values) // 2] if values else None


def _child(chosen: Any, backend: str, folder: str, name: str, limit: int | None) -> dict[str, Any]:
    arguments = [__file__, "--child", name, str(limit or 0), chosen.device, chosen.jit, folder]
    return {"model": name, "limit": limit} | asked_of_child(arguments, backend, chosen.device, limit or 0, folder, 600)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        name, limit, device, jit, folder = sys.argv[2:]
        print(json.dumps(trained(name, lambda: zoo(device)[name](), int(limit), device, jit, folder)))
    else:
        main()
