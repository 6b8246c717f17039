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
import logging
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from typing import Any

SHARES = (0.5, 0.25, 0.75)
STEPS = 3
_MIB = 2**20


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
    names = chosen.models.split(",") if chosen.models else list(_zoo(chosen.device))
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


def _zoo(device: str) -> dict[str, Any]:
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
    command = [sys.executable, __file__, "--child", name, str(limit or 0), chosen.device, chosen.jit, folder]
    env = {**os.environ, "KERAS_BACKEND": backend, "TF_CPP_MIN_LOG_LEVEL": "3", "XDG_CACHE_HOME": folder}
    if chosen.device == "cpu":
        env |= {"TF_CPU_ALLOCATOR_USE_BFC": "true", "TF_ENABLE_ONEDNN_OPTS": "0"}
        env["TF_CPU_BFC_MEM_LIMIT_IN_MB"] = str(limit // _MIB if limit else 8192)
    elif backend == "jax":
        env["XLA_PYTHON_CLIENT_MEM_FRACTION"] = str(limit / _gpu_bytes()) if limit else "0.4"
        # Without a limit only what is needed is taken, for others run beside it.
        env["XLA_PYTHON_CLIENT_PREALLOCATE"] = str(limit is not None).lower()
    elif backend == "tensorflow" and not limit:
        env["TF_FORCE_GPU_ALLOW_GROWTH"] = "true"
    asked = {"model": name, "limit": limit}
    try:
        child = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)
    except subprocess.TimeoutExpired:
        return asked | {"error": "no answer within 600 s"}
    if child.returncode:
        return asked | {"error": "\n".join(child.stderr.strip().splitlines()[-3:])[-600:]}
    answer: dict[str, Any] = json.loads(child.stdout.strip().splitlines()[-1])
    return asked | answer


def _gpu_bytes() -> int:
    command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[0]) * _MIB


# In the child


def _cap(backend: str, limit: int) -> None:
    """A small card out of a large one."""
    if backend == "tensorflow":
        import tensorflow as tf

        configuration = tf.config.LogicalDeviceConfiguration(memory_limit=limit // _MIB)
        tf.config.set_logical_device_configuration(tf.config.list_physical_devices("GPU")[0], [configuration])
    elif backend == "torch":
        import torch

        torch.cuda.set_per_process_memory_fraction(limit / torch.cuda.get_device_properties(0).total_memory)


def _train(name: str, limit: int, device: str, jit: str, folder: str) -> dict[str, Any]:
    import keras
    import numpy as np

    import oomproof
    from oomproof import _backends as backends
    from oomproof._planning.planner import Planner

    backend = keras.backend.backend()
    if device == "gpu" and limit:
        _cap(backend, limit)
    keras.utils.set_random_seed(1)
    case = _zoo(device)[name]()
    if jit != "auto":
        case.model.compile(case.model.optimizer, case.model.loss, jit_compile=jit == "on")

    class Batches(keras.utils.PyDataset):  # type: ignore[misc]
        def __len__(self) -> int:
            return STEPS

        def __getitem__(self, index: int) -> Any:
            rng = np.random.default_rng(index)

            def drawn(like: Any, least: int) -> Any:
                made = [
                    rng.integers(least, most, (case.batch, *shape)).astype(dtype)
                    if most
                    else rng.normal(size=(case.batch, *shape)).astype(dtype)
                    for shape, dtype, most in like
                ]
                return made[0] if len(made) == 1 else tuple(made)

            return drawn(case.data, 1), drawn(case.targets or [((1,), "int64", case.classes)], 0)

    path = pathlib.Path(folder) / f"{name}.npz"
    memory = backends.current().memory()
    began = time.perf_counter()
    if not limit:
        memory.reset_peak()
        if backend == "jax":
            # JAX cannot forget a peak, and finding the quickest kernels takes memory too: what XLA says counts.
            peak = oomproof.fit(
                case.model, Batches(), epochs=1, shuffle=False, verbose=0, plan=oomproof.Plan()
            ).run.peak
        else:
            case.model.fit(Batches(), epochs=1, shuffle=False, verbose=0)
            use = memory.usage()
            peak = None if use is None else use.peak
        np.savez(path, *case.model.get_weights())
        return {"peak": peak, "seconds": time.perf_counter() - began}
    # Failed probes count too: they wait as long as failed steps. What XLA is known to need before it runs, and is then
    # not run, is no failure.
    failures, refused, kind = 0, 0, type(memory)
    shortage = kind.shortage

    def counting(self: Any, error: BaseException) -> Any:
        nonlocal failures, refused
        found = shortage(self, error)
        if found is not None:
            failures += type(error).__name__ != "NotEnoughMemoryError"
            refused += type(error).__name__ == "NotEnoughMemoryError"
        return found

    setattr(kind, "shortage", counting)  # noqa: B010
    # What the planner says before the first step: nothing fits, or nothing fits unless its estimate is too high.
    hopeless, propose = False, Planner.propose

    def heeding(self: Any, *args: Any) -> Any:
        nonlocal hopeless
        found = propose(self, *args)
        hopeless |= found is not None and (found.predicted or 0) > (found.limit or 0)
        return found

    def heed(record: logging.LogRecord) -> bool:
        nonlocal hopeless
        hopeless |= "will not fit" in record.getMessage()
        return True

    setattr(Planner, "propose", heeding)  # noqa: B010
    logging.getLogger("oomproof").addFilter(heed)
    try:
        run = oomproof.fit(case.model, Batches(), epochs=1, shuffle=False, verbose=0).run
    except oomproof.CannotFitError as error:
        return {"cannot_fit": str(error), "failures": failures}
    except oomproof.RecoveryFailedError as error:
        events = [event.message for event in error.run.events] if error.run is not None else []
        return {
            "gave_up": str(error),
            "failures": failures,
            "events": events,
            "said_that_it_will_not_fit": hopeless,
        }
    plain = np.load(path).values() if path.exists() else []
    pairs = zip(plain, case.model.get_weights(), strict=path.exists())
    return {
        "finished": True,
        "updates": int(case.model.optimizer.iterations),
        "said_that_it_will_not_fit": hopeless,
        "failures": failures,
        "refused_before_they_ran": refused,
        "ooms": run.ooms,
        "peak": run.peak,
        "reserved": _reserved(backend),
        "difference": max((float(np.abs(a - b).max()) for a, b in pairs if a.size), default=None),
        "exact": not run.plan.caveats,
        "micro_batch_size": run.plan.micro_batch_size,
        "recomputed": len(run.plan.recompute),
        "segments": run.plan.segments,
        "events": [event.message for event in run.events],
        "seconds": time.perf_counter() - began,
    }


def _reserved(backend: str) -> int | None:
    """Bytes that torch's allocator took from the card, at most."""
    if backend != "torch":
        return None
    import torch

    return torch.cuda.max_memory_reserved() if torch.cuda.is_available() else None


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        name, limit, device, jit, folder = sys.argv[2:]
        print(json.dumps(_train(name, int(limit), device, jit, folder)))
    else:
        main()
