"""How far estimates are from what was measured. Runs anywhere; needs the frameworks, but no GPU.

    python benchmarks/estimate/score.py --engine trace --gpu h200
    python benchmarks/estimate/score.py --engine compile --stacks jax --name estimate-compile-jax
    python benchmarks/estimate/score.py --engine trace --largest
    python benchmarks/estimate/score.py --engine probe --gpu here --stacks torch --jobs 6    on the GPU of the truth
    python benchmarks/estimate/score.py --engine probe --gpu here --stacks torch --cap 0.75  when the step does not fit
    python benchmarks/estimate/score.py --engine probe --gpu here --stacks torch --largest

Reads benchmarks/estimate/truth and writes benchmarks/results/estimate-ENGINE.json. Every run of the design is in it,
those without truth or without an estimate too. The scoring half alone is to be quoted. With --largest it is about the
largest batch that fits, all in the scoring half, and the result is estimate-largest-ENGINE.json. With --cap a process
gets only that part of the peak that was measured, so that what is run to make an estimate cannot be the step itself.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import functools
import json
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from accuracy import by_stack, case, latest, named_share, truth_of
from collect import TRUTH, read
from design import written
from meters import card_bytes, environment, meter
from search import bracket, next_batch
from zoo_table import STACKS, entry

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))
from _common import write_result

MARK = "@@ "
COMPILED = ("jax", "tensorflow-xla")


def estimated(model: Any, batch: int, stack: str, options: argparse.Namespace) -> Any:
    """One estimate: the one place where the library is called."""
    import oomproof

    # Without a GPU Keras has said no to XLA on TensorFlow, whatever it was told: the stack says what was measured.
    gpu = None if options.gpu == "here" else options.gpu
    return oomproof.estimate(model, batch, gpu=gpu, engine=options.engine, jit=stack in COMPILED)


def answer(run: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    """What is said of a run: its peak, or where it has a memory to fit into, the largest batch that does."""
    import oomproof
    from zoo import compiled

    wanted = {key: run[key] for key in ("precision", "optimizer", "stack")}
    if "room" in run:
        meter(run["stack"], "gpu", run["room"])
    model, _ = compiled(run["model"], scale=options.scale, **wanted)
    if "memory" in run and options.gpu == "here":
        began = time.perf_counter()
        found = oomproof.max_batch_size(model, engine=options.engine, jit=run["stack"] in COMPILED)
        return {"expected": found, "sure": found, "seconds": time.perf_counter() - began}
    if "memory" in run:
        look = functools.cache(lambda batch: estimated(model, batch, run["stack"], options))
        start = entry(run["model"]).batch("medium")
        return {
            "expected": largest(lambda batch: look(batch).expected <= run["memory"], start),
            "sure": largest(lambda batch: look(batch).high <= run["memory"], start),
        }
    found = estimated(model, run["batch"], run["stack"], options)
    return {
        "low": found.low,
        "expected": found.expected,
        "high": found.high,
        "named": named_share(found.by_layer),
        "seconds": found.seconds,
        "layers": [list(layer) for layer in found.by_layer[:3]],
    }


def largest(fit: Callable[[int], bool], start: int) -> int:
    """The largest batch that is said to fit, searched as the true one was."""
    tried: dict[bool, list[int]] = {True: [], False: []}
    while (batch := next_batch(tried[True], tried[False], start)) is not None:
        tried[fit(batch)].append(batch)
    return max(tried[True], default=0)


def child(options: argparse.Namespace) -> None:
    """Estimates the runs that come on standard input, one after another."""
    for run in json.load(sys.stdin):
        print(MARK + json.dumps({"id": run["id"], "failed": "the process ended, or its time was up"}), flush=True)
        # The alarm ends the process, wherever it is; the parent starts another for what is left.
        signal.alarm(options.limit_s)
        try:
            found = answer(run, options)
        except Exception as error:
            found = {"failed": f"{type(error).__name__}: {error}"[:600]}
        signal.alarm(0)
        print(MARK + json.dumps({"id": run["id"], **found}), flush=True)


def answers(stack: str, runs: list[dict[str, Any]], options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Id → what is said of the run, from as many processes at a time as there are jobs."""
    parts = [runs[start :: options.jobs] for start in range(options.jobs)]
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        found = pool.map(lambda part: asked(stack, part, options), parts)
        return {run: said for part in found for run, said in part.items()}


def asked(stack: str, runs: list[dict[str, Any]], options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Id → what is said of the run, from one process after another on one stack."""
    # The longest first, where they are measured one by one.
    runs = sorted(runs, key=lambda run: run["model"] != "densenet121")
    told = read(options.said) if options.said else []
    found: dict[str, dict[str, Any]] = {said.pop("id"): said for said in told}
    found = {run["id"]: found[run["id"]] for run in runs if "failed" not in found.get(run["id"], {"failed": 1})}
    command = [sys.executable, __file__, "--child", "--engine", options.engine, "--gpu", options.gpu]
    command += ["--limit-s", str(options.limit_s), "--scale", str(options.scale)]
    variables = os.environ | {"KERAS_BACKEND": stack.split("-")[0], "TF_CPP_MIN_LOG_LEVEL": "2"}
    if options.gpu == "here":
        # Several processes share the card.
        variables |= {"TF_FORCE_GPU_ALLOW_GROWTH": "true", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    while left := [run for run in runs if run["id"] not in found and not options.machine]:
        known = len(found)
        if room := left[0].get("room"):
            # A limit is for the whole process.
            variables |= environment(stack, "gpu", room, room / (card_bytes() or room))
        if room or options.engine == "probe":
            # What another model left behind would be measured, too.
            left = left[:1]
        with subprocess.Popen(
            command, env=variables, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            with process.stdin as questions:
                json.dump(left, questions)
            for line in process.stdout:
                if line.startswith(MARK):
                    said = json.loads(line.removeprefix(MARK))
                    if options.said:
                        with options.said.open("a") as file:
                            file.write(json.dumps(said) + "\n")
                    found[said.pop("id")] = said
        if len(found) == known:
            sys.exit(f"The process for {stack} ended before its first case, with status {process.returncode}.")
        print(f"{stack}: {len(found)} of {len(runs)}", file=sys.stderr, flush=True)
    return found


def score_peaks(options: argparse.Namespace) -> None:
    cases = []
    for stack in options.stacks.split(","):
        measured = [row for row in read(options.truth / f"peaks-{stack}.jsonl") if row["scale"] == options.scale]
        rows = {row["id"]: row for row in latest(measured)}
        runs = [
            run | {"batch": rows.get(run["id"], run)["batch"]} for run in written()["runs"] if run["stack"] == stack
        ]
        # An estimate of what nobody ran tells nothing.
        told = {run for run, row in rows.items() if truth_of(row)["truth"]}
        wanted = [run for run in runs if run["id"] in told and options.only in (None, run["half"])]
        if options.gpu == "here" and stack.startswith("tensorflow"):
            # As the truth was measured: one region from the start.
            wanted = [run | {"room": rows[run["id"]]["room"]} for run in wanted]
        if options.cap is not None:
            peaks = {run["id"]: truth_of(rows[run["id"]])["truth"] for run in wanted}
            wanted = [run | {"room": int(options.cap * peaks[run["id"]])} for run in wanted]
        found = answers(stack, wanted, options)
        cases += [case(run, rows.get(run["id"]), found.get(run["id"], {})) for run in runs]
        figures = {"quoted": by_stack(cases, "scoring"), "tuning_half_not_quoted": by_stack(cases, "tuning")}
        write(options, "estimate", figures | {"cases": cases})


def score_largest(options: argparse.Namespace) -> None:
    cases = []
    for stack in options.stacks.split(","):
        runs = searches(read(options.truth / f"largest-{stack}.jsonl"))
        if options.gpu == "here":
            runs = [run | {"room": run["memory"]} for run in runs]
        found = answers(stack, [run for run in runs if run["fits"] is not None], options)
        for run in runs:
            said = found.get(run["id"], {})
            compared = bool(run["fits"]) and "expected" in said
            error = said["expected"] / run["fits"] - 1 if compared else None
            cases.append(run | said | {"error": error, "sure_fits": said["sure"] <= run["fits"] if compared else None})
        write(options, "estimate-largest", {"cases": cases})


def searches(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What was searched for, and between which two sizes the answer lies; `None` for searches without an end."""
    found: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for row in rows:
        found.setdefault((row["model"], row["memory"]), []).append(row)
    runs = []
    for (model, memory), tries in found.items():
        fits = [row["batch"] for row in tries if row["outcome"] == "finished"]
        fails = [row["batch"] for row in tries if row["outcome"] == "out of memory"]
        low, high = bracket(fits, fails) or (None, None)
        run = {key: tries[0][key] for key in ("model", "precision", "optimizer", "stack")}
        # What the allocator was really given differs a little from what was asked for.
        given = next((row["bytes_limit"] for row in tries if row.get("bytes_limit")), memory)
        name = f"{model}-in-{memory}-{run['stack']}"
        runs.append(run | {"id": name, "memory": given, "fits": low, "fails": high})
    return runs


def write(options: argparse.Namespace, name: str, figures: dict[str, Any]) -> None:
    settings = {"engine": options.engine, "gpu": options.gpu, "scale": options.scale, "cap": options.cap}
    machine = {"environment": json.loads(options.machine.read_text())["environment"]} if options.machine else {}
    write_result(options.name or f"{name}-{options.engine}", machine | settings | figures)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", default="auto")
    parser.add_argument("--gpu", default="h200", help='the card the truth is from; "here": the one in this machine')
    parser.add_argument("--stacks", default=",".join(STACKS))
    parser.add_argument("--only", choices=["tuning", "scoring"])
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--largest", action="store_true", help="score the largest batches instead of the peaks")
    parser.add_argument("--truth", type=pathlib.Path, default=TRUTH)
    parser.add_argument("--cap", type=float, default=None, help="the part of a measured peak a process may use")
    parser.add_argument("--said", type=pathlib.Path, help="keeps what is said as it comes; what is in it is not asked")
    parser.add_argument(
        "--machine", type=pathlib.Path, help="ask nothing, sum up --said; a result from the machine it is from"
    )
    parser.add_argument("--limit-s", type=int, default=600, help="for one run")
    parser.add_argument("--name", default=None, help="name of the result; estimate-ENGINE otherwise")
    parser.add_argument("--scale", type=float, default=1.0, help="shrinks the models: for smoke tests only")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options)
    else:
        (score_largest if options.largest else score_peaks)(options)


if __name__ == "__main__":
    main()
