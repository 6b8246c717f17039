"""Do plans hold on models nobody tuned for? Random models (`_grammar.py`), each at parts of its plain peak.

    python benchmarks/unseen.py --seed 1 --count 20                             # TensorFlow's allocator on the CPU
    KERAS_BACKEND=torch python benchmarks/unseen.py --device gpu --seed 1 --count 20
    python benchmarks/unseen.py --seed 1 --only 3:0.25,7:0.5                    # to look into some; writes no result
    python benchmarks/unseen.py --seed 1 --only 3:0.25 --as-budget              # the same bytes as a `budget`
    python benchmarks/unseen.py --seed 1 --count 20 --without head              # what a lever is worth

A seed counts the first time it is run; one that was looked at is material to tune on. Results go to
`results/unseen-DEVICE-BACKEND.json`, the newest seed last, so that the order in which they were run stays.

Each run is a process of its own: three steps from cold under a limit that is real. Everything that costs a user time is
a failure: a step that ran out of memory, a probe that did, a program that was compiled and refused, a crash, giving up.
Whether a run is feasible is decided by arithmetic and not by the planner: weights, optimizer slots and gradients have
to be within the limit; on a CPU also what Keras's own step takes for one sample.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import os
import pathlib
import statistics
import sys
import tempfile
import time
from collections import Counter
from typing import Any

from _plan_run import asked_of_child

SHARES = (0.75, 0.5, 0.25, 0.15)
Run = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--first", type=int, default=0, help="the number of the first model")
    parser.add_argument("--device", choices=("cpu", "gpu"), default="cpu")
    parser.add_argument("--shares", default=",".join(map(str, SHARES)))
    parser.add_argument("--only", help="number:share,…: look into these; nothing is written")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--jit", choices=("auto", "on", "off"), default="auto")
    parser.add_argument("--as-budget", action="store_true", help="give the bytes as a budget; the allocator has more")
    parser.add_argument("--without", default="", help="levers that are not allowed, such as head")
    parser.add_argument("--patience", type=int, default=600, help="seconds that a process may take")
    parser.add_argument("--total-s", type=float, default=1e9, help="no process is begun after this")
    parser.add_argument("--out", type=pathlib.Path, help="append each answer to this file as it comes")
    parser.add_argument("--read", type=pathlib.Path, help="run nothing, sum up what was written with --out")
    parser.add_argument("--machine", type=pathlib.Path, help="with --read: a result from the machine it was run on")
    options = parser.parse_args()
    read = options.read
    runs = [json.loads(line) for line in read.read_text().splitlines()] if read else Runs(options).all()
    if not options.only:
        _write(options, runs)


class Runs:
    """Runs models, each plain first and then in less memory, several side by side."""

    def __init__(self, options: Any) -> None:
        self._options = options
        self._end = time.monotonic() + options.total_s
        self._backend = os.environ.get("KERAS_BACKEND", "tensorflow")

    def all(self) -> list[Run]:
        options = self._options
        if options.only:
            pairs = [each.split(":") for each in options.only.split(",")]
            wanted = {int(n): [float(s) for m, s in pairs if m == n] for n, _ in pairs}
        else:
            shares = [float(share) for share in options.shares.split(",")]
            wanted = dict.fromkeys(range(options.first, options.first + options.count), shares)
        with tempfile.TemporaryDirectory() as folder, concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
            plain = {number: pool.submit(self._run, folder, number, None, 0) for number in wanted}
            pending: list[concurrent.futures.Future[Run]] = []
            for number, future in plain.items():
                found = future.result()
                for share in wanted[number] if found.get("peak") else ():
                    limit, floor = int(found["peak"] * share), found["floor"]
                    pending.append(pool.submit(self._run, folder, number, share, limit, floor))
            return [future.result() for future in (*plain.values(), *pending)]

    def _run(self, folder: str, number: int, share: float | None, limit: int, floor: int = 0) -> Run:
        options = self._options
        asked = {"seed": options.seed, "number": number, "share": share, "limit": limit or None, "floor": floor}
        if time.monotonic() > self._end:
            return asked | {"not_run": "no time was left"}
        budget = limit if options.as_budget else 0
        asked_for = options.seed, number, limit, budget, options.device, options.jit, folder, options.without
        arguments = [__file__, "--child", *map(str, asked_for)]
        began = time.monotonic()
        real = 0 if budget else limit
        answer = asked_of_child(arguments, self._backend, options.device, real, folder, options.patience)
        # What one sample takes on a CPU is known of the plain run alone.
        floor = max(floor, answer.get("floor", 0))
        run = asked | answer | {"floor": floor, "process_seconds": round(time.monotonic() - began, 1)}
        if options.out:
            with options.out.open("a") as file:
                file.write(json.dumps(run) + "\n")
        print(_line(run), file=sys.stderr, flush=True)
        return run


def _line(run: Run) -> str:
    name = f"{run['number']:>3} {run.get('model', '?'):<28}"
    if run["share"] is None:
        return f"{name} plain  {(run.get('peak') or 0) / 2**20:8.0f} MiB  {run.get('error', '')}"
    how = run.get("last_event") or run.get("error") or run.get("gave_up") or ""
    seconds = f"{run['process_seconds']} s, last step {run.get('step_seconds', 0):.2f} s"
    return f"{name} {run['share']:<5} {outcome(run):<12} fill {_fill(run) or 0:.2f}  {seconds}  {how}"


def outcome(run: Run) -> str:
    """What became of a run, in a word."""
    if "not_run" in run:
        return "not run"
    if run.get("floor", 0) > run["limit"] and not run.get("finished"):
        return "infeasible"
    if "error" in run:
        return "crashed"
    if not run.get("finished"):
        return "gave up"
    if run.get("budget") and (run["peak"] or 0) > run["budget"]:
        return "exceeded"
    return "failures" if run["failures"] or run["refused_before_they_ran"] else "held"


def _fill(run: Run) -> float | None:
    return run["peak"] / run["limit"] if run.get("peak") and run["limit"] else None


def summed_up(runs: list[Run]) -> dict[str, Any]:
    """The figures of one seed."""
    cells = [run for run in runs if run["share"] is not None]
    found: dict[str, Any] = {
        "models": len({run["number"] for run in cells}),
        "plain_failed": {
            run["number"]: run.get("error") for run in runs if run["share"] is None and not run.get("peak")
        },
    }
    shares = sorted({run["share"] for run in cells}, reverse=True)
    groups = {str(share): [run for run in cells if run["share"] == share] for share in shares}
    groups["75 to 25 %"] = [run for run in cells if run["share"] >= 0.25]
    for name, group in groups.items():
        counts = Counter(map(outcome, group))
        feasible = sum(counts[word] for word in ("held", "failures", "exceeded", "gave up", "crashed"))
        finished = feasible - counts["gave up"] - counts["crashed"]
        fills = [fill for run in group if run.get("finished") and (fill := _fill(run)) is not None]
        found[name] = {
            "feasible": feasible,
            **{word.replace(" ", "_"): counts[word] for word in ("held", "failures", "exceeded", "gave up", "crashed")},
            "infeasible": counts["infeasible"],
            "not_run": counts["not run"],
            "share_held": round(counts["held"] / feasible, 3) if feasible else None,
            "share_finished": round(finished / feasible, 3) if feasible else None,
            "median_peak_over_limit": round(statistics.median(fills), 3) if fills else None,
        }
    return found


def _write(options: Any, runs: list[Run]) -> None:
    from _common import RESULTS, environment, write_result

    backend = os.environ.get("KERAS_BACKEND", "tensorflow")
    name = f"unseen-{options.device}-{backend}" + ("" if options.jit == "auto" else f"-jit-{options.jit}")
    name += ("-budget" if options.as_budget else "") + (f"-without-{options.without}" if options.without else "")
    path = RESULTS / f"{name}.json"
    before = json.loads(path.read_text())["seeds"] if path.exists() else []
    machine = json.loads(options.machine.read_text())["environment"] if options.machine else environment()
    seed = {
        "seed": options.seed,
        "command": " ".join(["python", "benchmarks/unseen.py", *sys.argv[1:]]),
        "measured_on": machine,
        **summed_up(runs),
        "runs": runs,
    }
    write_result(name, {"seeds": [*before, seed]})


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        from _grammar import case, described
        from _plan_run import trained

        seed, number, limit, budget, device, jit, folder, without = sys.argv[2:]
        made: list[Any] = []

        def make() -> Any:
            made.append(case(int(seed), int(number), device))
            return made[0]

        answer = trained(f"{seed}-{number}", make, int(limit), device, jit, folder, int(budget), without)
        print(json.dumps({"model": made[0].model.name, **described(made[0]), **answer}))
    else:
        main()
