"""Estimates of models nobody tuned for, made without a GPU, against the peaks that a GPU measured.

    KERAS_BACKEND=torch python benchmarks/unseen_estimates.py RESULT.jsonl    # what `unseen.py --out` wrote there

Only the plain runs are read. The estimate is the one `oomproof.estimate` gives a user who names the card. On JAX what
was measured is a guarded step, whose new values have a place of their own; they are taken off, since Keras's own step
puts them in the place of the old.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import statistics
import time
from typing import Any

_JIT = {"auto": None, "on": True, "off": False}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("answers", type=pathlib.Path)
    parser.add_argument("--gpu", default="h200")
    parser.add_argument("--jit", choices=tuple(_JIT), default="auto", help="as the models were compiled there")
    parser.add_argument("--engine", default="auto")
    chosen = parser.parse_args()
    runs = [json.loads(line) for line in chosen.answers.read_text().splitlines()]
    plain = sorted((run for run in runs if run["share"] is None and run.get("peak")), key=lambda run: run["number"])
    rows = [_compared(run, chosen) for run in plain]
    from _common import write_result

    backend = os.environ.get("KERAS_BACKEND", "tensorflow")
    write_result(f"unseen-estimates-{backend}", {**_summed_up(rows), "rows": rows})


def _compared(run: dict[str, Any], chosen: Any) -> dict[str, Any]:
    import keras

    import oomproof
    from _grammar import case
    from oomproof._backends.common.footprint import bytes_of_state

    keras.utils.clear_session()
    made = case(run["seed"], run["number"], "gpu")
    began = time.perf_counter()
    made.model.optimizer.build(made.model.trainable_variables)
    beside = bytes_of_state(made.model) if keras.backend.backend() == "jax" else 0
    measured = run["peak"] - beside
    found: dict[str, Any] = {"seed": run["seed"], "model": made.model.name, "measured": measured}
    try:
        estimate = oomproof.estimate(made.model, made.batch, gpu=chosen.gpu, engine=chosen.engine, jit=_JIT[chosen.jit])
    except Exception as error:
        found["error"] = f"{type(error).__name__}: {error}"[:300]
    else:
        found |= {
            "estimated": estimate.expected,
            "high": estimate.high,
            "off_percent": round(100 * (estimate.expected / measured - 1), 2),
            "above_high": measured > estimate.high,
        }
    found["seconds"] = round(time.perf_counter() - began, 1)
    print(found, flush=True)
    return found


def _summed_up(rows: list[dict[str, Any]]) -> dict[str, Any]:
    off = [abs(row["off_percent"]) for row in rows if "off_percent" in row]
    return {
        "models": len(rows),
        "failed": [row["model"] for row in rows if "error" in row],
        "median_percent": round(statistics.median(off), 2) if off else None,
        "worst_percent": max(off, default=None),
        "above_high": [row["model"] for row in rows if row.get("above_high")],
    }


if __name__ == "__main__":
    main()
