"""Does TensorFlow need what its first step takes to look for quick kernels? The same runs with hardly more memory than
later steps use.

    python benchmarks/estimate/tight.py --out DIR --jobs 4          on a GPU, after collect.py

Takes the runs of truth/peaks-tensorflow-graph.jsonl whose first step had a peak at least a tenth above that of later
ones, gives each 6 % and 32 MiB more than the peak of later steps, and appends how it ended to DIR/tight.jsonl.
"""

from __future__ import annotations

import argparse
import json
import pathlib
from typing import Any

import pool
from accuracy import latest
from collect import TRUTH, read
from pool import Task


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--jobs", type=int, default=1)
    options = parser.parse_args()
    rows = latest(read(TRUTH / "peaks-tensorflow-graph.jsonl"))
    tasks = []
    for row in rows:
        if row["outcome"] != "finished" or row["first"]["peak"] < 1.1 * row["later"]["peak"]:
            continue
        names = ("id", "model", "batch", "precision", "optimizer", "stack", "device", "scale", "steps")
        case = {name: row[name] for name in names}
        room = int(1.06 * row["later"]["peak"]) + 32 * 2**20
        tasks.append(Task(case | {"room": room, "first_then": row["first"]["peak"]}, 0.05, 120))

    def finished(task: Task, result: dict[str, Any]) -> list[Task]:
        with (options.out / "tight.jsonl").open("a") as file:
            file.write(json.dumps(task.case | result) + "\n")
        print(task.case["id"], result["outcome"], flush=True)
        return []

    pool.run(tasks, options.jobs, finished)


if __name__ == "__main__":
    main()
