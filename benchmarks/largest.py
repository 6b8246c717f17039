"""The largest thing that trains in 8 GB: plain Keras, Keras's own gradient accumulation, and oomproof, in one table.

    KERAS_BACKEND=torch python benchmarks/largest.py --total-s 540 --out tries.jsonl           # on a GPU
    KERAS_BACKEND=torch python benchmarks/largest.py --cells 'batch-*,depth-transformer-plain'  # some of it
    KERAS_BACKEND=tensorflow python benchmarks/largest.py --tiny             # on a CPU, to see that it runs

Two questions. The largest batch, of a transformer of 6 layers (width 512, 512 tokens) and of ResNet50 at 224²:

    plain           given to `fit`
    accumulation    given to `fit` with `gradient_accumulation_steps` in the optimizer. This is what fits at once, so
                    the figure is that of the micro-batch: the effective batch is as many times that as one likes, but
                    the script changes, and so many calls make one update
    oomproof        given to one call of `oomproof.fit`, an update each, up to a ceiling

And the deepest transformer of that width at batch 32: plain; with accumulation over 32 batches of one sample, which is
another script; and with `oomproof.fit` at batch 32.

Each try is a process of its own with a memory limit that is real, and trains two steps (with accumulation: until an
update is made, and one call more) in float32 with Adam. It succeeds if it ends with a finite loss. The value is doubled
until a try fails, then bisected until the bracket is within 8 % (batches) or 5 % or one layer (depths). Cells are
searched side by side, so times mean little. At the end of --total-s what is known is written: "largest" trained,
"first_failing" did not, and "closed" says whether the search between them was finished.

On a CPU only TensorFlow has a limit that is real; on the others the tiny version pretends.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import fnmatch
import json
import math
import os
import pathlib
import subprocess
import sys
import tempfile
import threading
import time
from typing import Any, NamedTuple

METHODS = ("plain", "accumulation", "oomproof")
ACCUMULATED = 4  # For batches; any number does, since memory does not depend on it.
DEPTH_BATCH = 32
_MIB = 2**20
# A try that is begun with less time than this left would not end.
_SHORTEST_TRY = 15
# The largest that is pretended to fit, where a CPU has no limit.
_PRETENDED = {"batch": 20, "depth": 3}
Record = dict[str, Any]


class Cell(NamedTuple):
    """One search: a question, a model and a method, where to begin and where to stop."""

    question: str
    model: str
    method: str
    start: int
    ceiling: int

    @property
    def name(self) -> str:
        return f"{self.question}-{self.model}-{self.method}"

    @property
    def tolerance(self) -> float:
        return 1.08 if self.question == "batch" else 1.05

    @property
    def ceiling_first(self) -> bool:
        """Where the ceiling is likely to train, one try answers it all."""
        return self.question == "batch" and self.method == "oomproof"


def cells(tiny: bool, ceiling: int, deepest: int, compiled: bool) -> list[Cell]:
    """Those that take longest first. Deep models that are compiled take long, so there the search begins lower."""
    depths = {"accumulation": 24 if compiled else 96, "oomproof": 24 if compiled else 48, "plain": 8}
    batches = {"transformer": 32, "resnet50": 64}
    found = [Cell("depth", "transformer", m, 2 if tiny else start, deepest) for m, start in depths.items()]
    for method in reversed(METHODS):
        found += [Cell("batch", name, method, 8 if tiny else start, ceiling) for name, start in batches.items()]
    return sorted(found, key=lambda cell: cell.method == "plain")


def next_value(cell: Cell, low: int, high: int | None) -> int | None:
    """What to try when `low` trained (0: nothing did) and `high` failed (`None`: nothing did); `None` at the end."""
    if high is None:
        if not low:
            return cell.ceiling if cell.ceiling_first else min(cell.start, cell.ceiling)
        return None if low >= cell.ceiling else min(2 * low, cell.ceiling)
    if high - low <= 1 or (low and high / low <= cell.tolerance):
        return None
    if not low:
        return min(cell.start, high // 2)
    if high > 4 * low:
        return 2 * low
    return min(max(low + 1, round(math.sqrt(low * high))), high - 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="small models on the CPU; the figures mean nothing")
    parser.add_argument("--cells", default="*", help="names or patterns such as 'batch-*', with commas between them")
    parser.add_argument("--list", action="store_true", help="say what cells there are")
    parser.add_argument("--memory", help="that each try may use; 8GiB, tiny 64MiB")
    parser.add_argument("--ceiling", type=int, help="largest batch that is tried; 4096, tiny 256")
    parser.add_argument("--deepest", type=int, help="largest depth that is tried; 384, tiny 8")
    parser.add_argument("--jobs", type=int, default=8, help="tries side by side")
    parser.add_argument("--try-s", type=float, default=240, help="a try that takes longer counts as one that fails")
    parser.add_argument("--total-s", type=float, default=3600, help="after this the search ends where it is")
    parser.add_argument("--out", type=pathlib.Path, help="also append each try to this file as it comes")
    parser.add_argument("--resume", type=pathlib.Path, help="written with --out: its tries are not run again")
    parser.add_argument("--machine", type=pathlib.Path, help="with --resume: a result from the machine it was run on")
    parser.add_argument("--name", help="of the result; largest-gpu-BACKEND otherwise")
    chosen = parser.parse_args()
    ceiling, deepest = (256, 8) if chosen.tiny else (4096, 384)
    backend = os.environ.get("KERAS_BACKEND", "tensorflow")
    every = cells(chosen.tiny, chosen.ceiling or ceiling, chosen.deepest or deepest, backend != "torch")
    patterns = chosen.cells.split(",")
    asked = [cell for cell in every if any(fnmatch.fnmatch(cell.name, pattern) for pattern in patterns)]
    if chosen.list or not asked:
        print("\n".join(cell.name for cell in every))
        return
    from _common import environment, write_result

    if not chosen.tiny and environment()["gpu"] is None and chosen.resume is None:
        print("needs a GPU; --tiny shows that it runs", file=sys.stderr)
        return
    from oomproof._records.units import parse_budget

    limit = parse_budget(chosen.memory or ("64MiB" if chosen.tiny else "8GiB"), None)
    assert limit is not None
    with tempfile.TemporaryDirectory() as folder:
        tries = Tries(chosen, backend, limit, folder)
        with concurrent.futures.ThreadPoolExecutor(max(1, chosen.jobs)) as pool:
            found = list(pool.map(tries.search, asked))
    print(_table(found), file=sys.stderr, flush=True)
    write_result(
        chosen.name or f"largest-{'tiny' if chosen.tiny else 'gpu'}-{backend}",
        {
            "command": " ".join([f"KERAS_BACKEND={backend}", "python", "benchmarks/largest.py", *sys.argv[1:]]),
            "memory": limit,
            "limit_is_real": not chosen.tiny or backend == "tensorflow",
            "accumulation_is": "the micro-batch that fits at once; several calls of a changed script make one update",
            "cells": found,
            "table": _table(found).splitlines(),
            **({"measured_on": json.loads(chosen.machine.read_text())["environment"]} if chosen.machine else {}),
        },
    )


def _table(found: list[Record]) -> str:
    rows = list(dict.fromkeys((cell["question"], cell["model"]) for cell in found))
    said = {(cell["question"], cell["model"], cell["method"]): cell["said"] for cell in found}
    lines = ["| largest | " + " | ".join(METHODS) + " |", "|---" * (1 + len(METHODS)) + "|"]
    for question, model in rows:
        shown = [said.get((question, model, method), "") for method in METHODS]
        lines.append(f"| {question} of {model} | " + " | ".join(shown) + " |")
    return "\n".join(lines)


class Tries:
    """Runs tries in processes of their own until the time is over."""

    def __init__(self, chosen: argparse.Namespace, backend: str, limit: int, folder: str) -> None:
        self.chosen = chosen
        self.limit = limit
        self.end = time.monotonic() + chosen.total_s
        told = [json.loads(line) for line in chosen.resume.read_text().splitlines()] if chosen.resume else []
        self.known = {(each["cell"], each["value"]): each for each in told if each["outcome"] != "cut off"}
        self._lock = threading.Lock()
        self.env = {**os.environ, "KERAS_BACKEND": backend, "TF_CPP_MIN_LOG_LEVEL": "3"}
        # Each plan is made anew, and processes side by side do not fight for cores.
        self.env["OOMPROOF_CACHE_DIR"] = folder
        if chosen.jobs > 1:
            self.env.setdefault("OMP_NUM_THREADS", "2")
        if chosen.tiny:
            self.env |= {"TF_CPU_ALLOCATOR_USE_BFC": "true", "TF_ENABLE_ONEDNN_OPTS": "0"}
            self.env["TF_CPU_BFC_MEM_LIMIT_IN_MB"] = str(limit // _MIB)
        elif backend == "jax":
            from _plan_run import gpu_bytes

            self.env["XLA_PYTHON_CLIENT_MEM_FRACTION"] = str(limit / gpu_bytes())

    def search(self, cell: Cell) -> Record:
        low, high, errors, over = 0, None, 0, False
        tries: list[Record] = []
        while (value := next_value(cell, low, high)) is not None:
            left, known = self.end - time.monotonic(), self.known.get((cell.name, value))
            if left < _SHORTEST_TRY and known is None:
                over = True
                break
            answer = known or self._try(cell, value, left)
            tries.append(answer)
            if answer["outcome"] == "trained":
                low = value
            elif answer["outcome"] == "cut off":
                over = True
                break
            else:
                high = value
                errors = errors + 1 if answer["outcome"] == "error" else 0
                if errors >= 2 and not low:
                    break  # It is not the memory.
        at_ceiling = low >= cell.ceiling
        closed = at_ceiling or (bool(low) and high is not None and next_value(cell, low, high) is None)
        unit = ">= " if at_ceiling or (low and not closed) else ""
        said = f"{unit}{low}" if low else "none" if high == 1 else "not known"
        if high is not None and low and not closed:
            said += f" and < {high}"
        return {
            "cell": cell.name,
            "question": cell.question,
            "model": cell.model,
            "method": cell.method,
            "largest": low or None,
            "first_failing": high,
            "first_failing_because": next((each["outcome"] for each in tries if each["value"] == high), None),
            "said": said,
            "at_ceiling": at_ceiling,
            "closed": closed,
            "out_of_time": over,
            "tries": tries,
        }

    def _try(self, cell: Cell, value: int, left: float) -> Record:
        options = {**cell._asdict(), "value": value, "limit": self.limit, "tiny": self.chosen.tiny}
        command = [sys.executable, __file__, "--child", json.dumps(options)]
        began = time.monotonic()
        try:
            timeout = min(self.chosen.try_s, left)
            child = subprocess.run(command, env=self.env, capture_output=True, text=True, timeout=timeout)
            lines = [line for line in child.stdout.splitlines() if line.startswith('{"outcome"')]
            if lines:
                answer = json.loads(lines[-1])
            else:
                said = "\n".join(child.stderr.strip().splitlines()[-4:])[-400:]
                answer = {"outcome": "error", "error": f"ended with {child.returncode}: {said}"}
        except subprocess.TimeoutExpired:
            answer = {"outcome": "cut off" if left <= self.chosen.try_s else "took too long"}
        answer = {"value": value, "seconds": round(time.monotonic() - began, 1), **answer}
        with self._lock:
            if self.chosen.out:
                with self.chosen.out.open("a") as file:
                    file.write(json.dumps({"cell": cell.name, **answer}) + "\n")
            print(cell.name, answer, file=sys.stderr, flush=True)
        return answer


# In the child


def transformer(depth: int, tiny: bool) -> Any:
    from _plan_zoo import tagger

    return tagger(depth, 64, 64, 100) if tiny else tagger(depth, 512, 512, 1000)


def resnet50(tiny: bool) -> Any:
    import keras

    if tiny:
        from _plan_zoo import residual_batchnorm

        return residual_batchnorm(False).model
    return keras.applications.ResNet50(weights=None, input_shape=(224, 224, 3), classes=10, classifier_activation=None)


def samples(model: Any, count: int) -> tuple[Any, Any]:
    """Few numbers again and again: to draw billions takes longer than to train on them."""
    import numpy as np

    rng = np.random.default_rng(0)
    shape, out = model.input_shape[1:], model.output_shape
    few = min(count, 32)
    tokens = len(out) == 3
    x = (
        rng.integers(0, out[-1], (few, *shape), dtype="int32")
        if tokens
        else rng.standard_normal((few, *shape), "float32")
    )
    y = rng.integers(0, out[-1], (few, *out[1:-1]), dtype="int32")
    whole = np.arange(count) % few
    return x[whole], y[whole]


def train(options: Record) -> Record:
    import keras

    import oomproof

    question, method, value, tiny = (options[name] for name in ("question", "method", "value", "tiny"))
    # Keras walks through a functional model by recursion, which has nothing to do with memory.
    sys.setrecursionlimit(100_000)
    if not tiny:
        from _plan_run import cap

        cap(keras.backend.backend(), options["limit"])
    elif keras.backend.backend() != "tensorflow" and method == "plain" and value > _PRETENDED[question]:
        return {"outcome": "out of memory", "error": "pretended"}
    keras.utils.set_random_seed(0)
    depth, batch = (value, DEPTH_BATCH) if question == "depth" else (2 if tiny else 6, value)
    over, calls = None, 2
    if method == "accumulation":
        over, batch = (DEPTH_BATCH, 1) if question == "depth" else (ACCUMULATED, batch)
        calls = over + 1
    model = resnet50(tiny) if options["model"] == "resnet50" else transformer(depth, tiny)
    x, y = samples(model, batch)

    class Batches(keras.utils.PyDataset):  # type: ignore[misc]
        def __len__(self) -> int:
            return calls

        def __getitem__(self, index: int) -> Any:
            return x, y

    optimizer = keras.optimizers.Adam(1e-4, gradient_accumulation_steps=over)
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    fit = oomproof.fit if method == "oomproof" else type(model).fit
    history = fit(model, Batches(), epochs=1, shuffle=False, verbose=0)
    loss = float(history.history["loss"][-1])
    found: Record = {"outcome": "trained" if math.isfinite(loss) else "loss is not finite", "loss": str(loss)}
    if method == "oomproof":
        run = history.run
        found |= {"plan": run.plan.sentence, "ooms": run.ooms, "peak": run.peak, "exact": not run.plan.caveats}
    return found


def tried(options: Record) -> Record:
    import oomproof
    from oomproof import _backends as backends

    try:
        return train(options)
    except oomproof.OomproofError as error:
        return {"outcome": "out of memory", "error": f"{type(error).__name__}: {error}"[:400]}
    except Exception as error:
        short = backends.current().memory().shortage(error)
        if short is not None:
            telling = [line.strip() for line in str(error).splitlines() if "memory" in line or "OOM" in line]
            return {"outcome": "out of memory", "error": (telling or [short.text])[0][:400]}
        return {"outcome": "error", "error": f"{type(error).__name__}: {error}"[:400]}


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        print("\n" + json.dumps(tried(json.loads(sys.argv[2]))), flush=True)
    else:
        main()
