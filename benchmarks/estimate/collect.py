"""Measures the peaks that estimates are judged by, on a GPU: the runs of the design, or the largest batch that fits.

    python benchmarks/estimate/collect.py --stack jax --jobs 6 --out DIR
    python benchmarks/estimate/collect.py --stack jax --jobs 6 --out DIR --max-batch --memory 8GiB
    python benchmarks/estimate/collect.py --stack torch --device cpu --scale 0.05 --batch 2 --out DIR    a smoke test

Each result is appended to DIR/peaks-STACK.jsonl or DIR/largest-STACK.jsonl at once, so that a call that is cut off
keeps what it has. What is there already, or in benchmarks/estimate/truth, is not run again: the same call goes on.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import pathlib
import signal
import sys
import time
from typing import Any

import pool
from design import written
from meters import card_bytes
from pool import Task
from search import next_batch
from zoo_table import LEVELS, STACKS, TROUBLES, entry

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))
from _common import environment
from oomproof._records.units import parse_budget

TRUTH = pathlib.Path(__file__).parent / "truth"
# Parts of a card of 139 GiB that are mostly enough; a run that needs more gets twice as much and tries again.
SHARES = {"small": 0.05, "medium": 0.09, "large": 0.18}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stack", choices=STACKS, required=True)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--usable", type=float, default=pool.USABLE, help="part of the card, where others are on it")
    parser.add_argument("--limit-s", type=float, default=420, help="for one run, where the design has no lower limit")
    parser.add_argument("--total-s", type=float, default=None, help="for this call; what is running then is given up")
    parser.add_argument("--only", choices=["tuning", "scoring"])
    parser.add_argument("--batch-levels", default=",".join(LEVELS))
    parser.add_argument("--models", default=None, help="names, with commas; all otherwise")
    parser.add_argument("--retry", action="store_true", help="run again what is recorded but did not finish")
    parser.add_argument("--max-batch", action="store_true", help="search the largest batch that fits --memory")
    parser.add_argument("--memory", default="8GiB")
    parser.add_argument("--device", choices=["gpu", "cpu"], default="gpu")
    parser.add_argument("--scale", type=float, default=1.0, help="shrinks the models: for smoke tests only")
    parser.add_argument("--batch", type=int, default=None, help="instead of the design's: for smoke tests only")
    return parser.parse_args()


class Collector:
    """What both modes share: the card, the file, and what is known of the machine."""

    def __init__(self, options: argparse.Namespace, kind: str) -> None:
        self.options = options
        self.card = card_bytes() if options.device == "gpu" else None
        if options.device == "gpu" and self.card is None:
            sys.exit("There is no GPU here that nvidia-smi knows. With --device cpu the collector itself can be tried.")
        backend = options.stack.split("-")[0]
        if importlib.util.find_spec(backend) is None:
            sys.exit(f"There is no {backend} here.")
        options.out.mkdir(parents=True, exist_ok=True)
        self.path = options.out / f"{kind}-{options.stack}.jsonl"
        rows = [row for path in {self.path, TRUTH / self.path.name} for row in read(path)]
        # Running out of memory is an answer too: in these runs it comes from the limit that was asked for.
        self.known = [row for row in rows if row["outcome"] in ("finished", "out of memory") or not options.retry]
        about = environment()
        self.machine = {"gpu": about["gpu"], "versions": about["versions"], "python": about["python"]}

    def record(self, row: dict[str, Any]) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(row | self.machine) + "\n")
            file.flush()
            os.fsync(file.fileno())
        peaks = [row[key]["peak"] for key in ("first", "later") if row.get(key) and row[key]["peak"] is not None]
        peak = f"{max(peaks) / 2**20:9.0f} MiB" if peaks else " " * 13
        error = " ".join(row.get("error", "").split())[:160]
        print(f"{row['outcome']:13} {peak} {row['seconds']:7.1f} s  {row['id']}  {error}", flush=True)

    def task(self, run: dict[str, Any], share: float, **more: Any) -> Task:
        """A task for a run of the design, or for one like it."""
        room = None if self.card is None else int(share * self.card)
        case = run | {"device": self.options.device, "scale": self.options.scale, "room": room} | more
        limit = min(run["limit_s"] or self.options.limit_s, self.options.limit_s)
        return Task(case, share, limit)

    def go(self, tasks: list[Task], finished: Any) -> None:
        total = self.options.total_s
        deadline = None if total is None else time.monotonic() + total
        left = pool.run(tasks, self.options.jobs, finished, deadline, self.options.usable)
        print(f"{len(left)} left for another call" if left else "all done", flush=True)

    def wanted(self, model: str) -> bool:
        return self.options.models is None or model in self.options.models.split(",")


class Peaks(Collector):
    """The runs of the design on one stack, quick ones first."""

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__(options, "peaks")

    def collect(self) -> None:
        options, known = self.options, {row["id"] for row in self.known}
        runs = [
            run
            for run in written()["runs"]
            if run["stack"] == options.stack
            and run["id"] not in known
            and run["level"] in options.batch_levels.split(",")
            and options.only in (None, run["half"])
            and self.wanted(run["model"])
        ]
        runs.sort(key=lambda run: (run["trouble"] is not None, LEVELS.index(run["level"])))
        smaller = {} if options.batch is None else {"batch": options.batch}
        self.go([self.task(run, SHARES[run["level"]], steps=3, **smaller) for run in runs], self.finished)

    def finished(self, task: Task, result: dict[str, Any]) -> list[Task]:
        if result["outcome"] == "out of memory" and task.share < pool.USABLE and self.card is not None:
            return [self.task(task.case, min(2 * task.share, pool.USABLE))]
        if task.case["stack"] == "jax" and result["outcome"] == "finished" and "while_compiling" not in task.case:
            # Looking for the quickest kernels takes memory once, and JAX cannot forget it: once more, compiled already.
            return [self.task(task.case, task.share, while_compiling=result["first"])]
        self.record(task.case | result)
        return []


class Largest(Collector):
    """The largest batch of some models in so much memory, each try in a fresh process, float32 with Adam."""

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__(options, "largest")
        if options.device == "cpu" and not options.stack.startswith("tensorflow"):
            sys.exit("On the CPU only TensorFlow can be given a limit.")
        self.memory = parse_budget(options.memory, self.card) or 0
        self.tries: dict[str, list[dict[str, Any]]] = {}
        for row in self.known:
            if row["memory"] == self.memory:
                self.tries.setdefault(row["model"], []).append(row)

    def collect(self) -> None:
        models = [model for model in written()["largest_batch"] if self.wanted(model)]
        self.go([task for model in models for task in self.following(model)], self.finished)

    def following(self, model: str) -> list[Task]:
        """The next try, if one is needed. A try that ended any other way than by memory ends the search."""
        tries = self.tries.get(model, [])
        fits = [row["batch"] for row in tries if row["outcome"] == "finished"]
        fails = [row["batch"] for row in tries if row["outcome"] == "out of memory"]
        batch = next_batch(fits, fails, self.options.batch or entry(model).batch("medium"))
        if batch is None or len(fits) + len(fails) < len(tries):
            return []
        trouble = [t for t in TROUBLES if (t.kind, t.stack) == (entry(model).kind, self.options.stack)]
        run = {
            "id": f"{model}-{batch}-in-{self.options.memory}-{self.options.stack}",
            "model": model,
            "batch": batch,
            "precision": "float32",
            "optimizer": "adam",
            "stack": self.options.stack,
            "memory": self.memory,
            "limit_s": trouble[0].limit_s if trouble else None,
        }
        return [self.task(run, self.memory / self.card if self.card else 0.1, steps=2, room=self.memory)]

    def finished(self, task: Task, result: dict[str, Any]) -> list[Task]:
        row = task.case | result
        self.record(row)
        self.tries.setdefault(row["model"], []).append(row)
        return self.following(row["model"])


def read(path: pathlib.Path) -> list[dict[str, Any]]:
    """Rows of a file of JSON lines; none where there is no file. A last line that was cut off is passed over."""
    found = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return found


def main() -> None:
    options = arguments()
    # Whoever ends this process ends the runs with it.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    (Largest if options.max_batch else Peaks)(options).collect()


if __name__ == "__main__":
    main()
