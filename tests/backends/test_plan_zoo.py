"""Plans made before the first step, for many small models in a part of the memory that plain training takes.

Each in a process of its own, under TensorFlow's real allocator with a limit (benchmarks/plans.py, which runs all of
them at all budgets). Here every model meets one budget and every budget several models. Peaks of plain training are
those of the benchmark's last result.
"""

import itertools
import json
import os
import pathlib
import subprocess
import sys

import pytest
from here import only

BENCHMARKS = pathlib.Path(__file__).parents[2] / "benchmarks"
SHARES = (0.5, 0.75, 0.25)
STEPS = 3
# Of `make test`: they meet each share, and some are recomputed.
FEW = ("mlp", "lstm", "attention_pooling", "convolutions")

pytestmark = only("tensorflow", because="peaks of a real allocator on a CPU")


def design():
    """(model, share): shares in turn, the next one where weights and slots alone leave no room in the first."""
    known = json.loads((BENCHMARKS / "results" / "plans-cpu-tensorflow.json").read_text())
    refused = set(known["refused"])
    turn = itertools.cycle(range(len(SHARES)))
    for model in known["plain"]:
        first = next(turn)
        shares = SHARES[first:] + SHARES[:first]
        yield model, next(share for share in shares if f"{model} at {share}" not in refused)


@pytest.fixture(scope="module")
def cells(request):
    everything = request.config.getoption("exhaustive")
    return [(model, share) for model, share in design() if everything or model in FEW]


@pytest.fixture(scope="module")
def runs(cells, tmp_path_factory):
    out = tmp_path_factory.mktemp("zoo") / "runs.jsonl"
    cells = ",".join(f"{model}:{share}" for model, share in cells)
    command = [sys.executable, str(BENCHMARKS / "plans.py"), "--cells", cells, "--out", str(out)]
    subprocess.run(command, env={**os.environ, "KERAS_BACKEND": "tensorflow"}, check=True, capture_output=True)
    return [json.loads(line) for line in out.read_text().splitlines()]


def test_every_run_ends_with_the_batch_that_was_asked_for(runs, cells):
    assert len(runs) == len(cells)
    assert len(list(design())) >= 12
    assert [run for run in runs if not run.get("finished") or run["updates"] != STEPS] == []


def test_memory_runs_out_in_hardly_any(runs, cells):
    assert {share for _, share in cells} == set(SHARES)
    failed = [(run["model"], run["limit"], run["events"]) for run in runs if run.get("failures", 1)]
    assert len(failed) <= 1, failed


def test_some_are_cut_and_some_are_recomputed(runs):
    """Budgets are so small that the batch as it is fits in none."""
    assert [run["model"] for run in runs if not run["micro_batch_size"] and not run["recomputed"]] == []
    assert any(run["micro_batch_size"] for run in runs)
    assert any(run["recomputed"] for run in runs)
