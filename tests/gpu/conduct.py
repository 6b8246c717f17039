"""Runs what is measured on a GPU side by side where only memory counts, and alone where time does.

    python tests/gpu/conduct.py torch OUT --seconds 900 --alone 120,420 --ready FILE

The jobs of each program are listed below, most wanted first. Those that count memory run together as far as cores and
card allow; between the two seconds of --alone those that take times run one after another; then the rest goes on.
Output goes to OUT, job by job.
TensorFlow may arrive later than the rest: its jobs wait for FILE, a script to be sourced before them.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import pathlib
import signal
import subprocess
import tempfile
import time

CORES, CARD = 16, 132


@dataclasses.dataclass(frozen=True)
class Job:
    """A command of bash: `$O` is where results go, `cores` and `card` (GB) what it takes, `limit` its seconds.

    It does not begin before the second `after`.
    """

    name: str
    backend: str
    command: str
    limit: int
    cores: int = 1
    card: int = 8
    alone: bool = False
    after: int = 0


def collect(stack: str, cores: int, usable: float, limit: int, more: str = "") -> Job:
    command = f"python benchmarks/estimate/collect.py --stack {stack} --jobs {cores} --usable {usable} --out $O {more}"
    command += f" --total-s {limit - 5}"
    name = f"collect-{stack}" + ("-largest" if "--max-batch" in more else "")
    return Job(name, stack.split("-")[0], command, limit, cores, int(usable * 139))


def plans(backend: str, cores: int, limit: int, more: str = "", name: str = "", card: int = 30) -> Job:
    name = name or f"plans-{backend}"
    command = f"python benchmarks/plans.py --device gpu --jobs {cores} {more} --out $O/{name}.jsonl"
    return Job(name, backend, command, limit, cores, card)


def score(engine: str, stack: str, limit: int, more: str = "", jobs: int = 3, after: int = 0) -> Job:
    command = "python benchmarks/estimate/score.py --gpu here --truth $O"
    command += f" --engine {engine} --stacks {stack} --jobs {jobs}"
    name = f"{engine}-{stack}" + "".join(f"-{word}" for word in ("largest", "cap") if f"--{word}" in more)
    command += f" --only scoring --name estimate-{name}-gpu --said $O/said-{name}.jsonl {more}"
    # Those that have to wait get the machine to themselves.
    return Job(f"score-{name}", stack.split("-")[0], command, limit, CORES if after else jobs, 20, after=after)


def step(name: str, backend: str, limit: int, more: str) -> Job:
    command = f"python benchmarks/step.py --device gpu --name step-gpu-{name} {more}"
    return Job(f"step-{name}", backend, command, limit, alone=True)


def plan_times(backend: str, limit: int, more: str) -> Job:
    command = f"python benchmarks/plan_times.py {more} --out $O/plan-times-{backend}.jsonl"
    return Job(f"plan-times-{backend}", backend, command, limit, alone=True)


def host_fed(backend: str, limit: int) -> Job:
    return Job(f"host-fed-{backend}", backend, "python benchmarks/host_fed.py --pieces 16", limit, alone=True)


def kernels(backend: str, cores: int, seconds: int, more: str = "") -> Job:
    """What single layers take, so many processes side by side."""
    one = f"python benchmarks/estimate/kernels.py --seconds {seconds} --part $part/{cores} --out $O {more}"
    name = f"kernels-{backend}" + ("-option" if more else "")
    return Job(name, backend, f"for part in $(seq 0 {cores - 1}); do {one} & done; wait", seconds + 40, cores, 30)


# Those whose grids were cut off last time first.
TIMED = "--models encoder,vision_transformer,plain_cnn,residual_batchnorm"
GRAPH = "--models encoder,mlp,unet,plain_cnn"
XLA_LIMIT = "python benchmarks/xla_limit.py --models residual_batchnorm,plain_cnn,decoder"
LARGEST = "python benchmarks/largest.py --resume $O/largest-seed.jsonl --out $O/largest.jsonl"


UNFINISHED = "--models unet,dilated_segmentation,decoder"

PROGRAMS = {
    "torch": (
        plans("torch", 6, 200, "--resume $O/plans-torch-known.jsonl", card=100),
        Job("xla-limit", "jax", f"{XLA_LIMIT} --total-s 300 --out $O/xla-limit.jsonl", 310, 1, 20),
        plan_times("torch", 290, f"--total-s 265 {TIMED} --levels 2 --micros 1,2,4,8 --steps 5"),
        step("recompute-torch", "torch", 70, "--parts recompute-transformer --shares 0.3,0.25,0.2"),
        Job("largest", "torch", f"{LARGEST} --total-s 390 --jobs 2", 410, 2, 18),
        collect("jax", 6, 0.5, 400, "--limit-s 240"),
    ),
    "tensorflow": (
        host_fed("jax", 110),
        host_fed("tensorflow", 110),
        step("pieces-graph", "tensorflow", 80, "--parts pieces-conv --pieces 1,2,4,8,16,32 --jit no"),
        plans("torch", 1, 100, "--models mlp --resume $O/plans-torch-known.jsonl", card=20),
        plans("tensorflow", 4, 400, "--jit on --models encoder,mlp --shares 0.5,0.25", "plans-tensorflow-xla", 20),
        plans("tensorflow", 4, 300, f"--jit off {GRAPH} --shares 0.5,0.25", "plans-tensorflow-graph", 40),
        score("probe", "tensorflow-graph", 400),
        score("probe", "tensorflow-graph", 300, "--largest"),
    ),
    "truth": (
        kernels("jax", 7, 170),
        collect("tensorflow-xla", 7, 0.35, 520, "--limit-s 260"),
        collect("jax", 4, 0.3, 300, "--limit-s 200"),
        kernels("jax", 1, 90, "--numbers 79,176,226 --option xla_gpu_autotune_level=0"),
        kernels("tensorflow", 2, 170),
        collect("jax", 6, 0.36, 420, "--max-batch --memory 8GiB --limit-s 150"),
    ),
    "probes": (
        score("probe", "torch", 150, jobs=7),
        score("probe", "tensorflow-graph", 190, jobs=5),
    ),
    "answers": (
        collect("jax", 4, 0.26, 440, f"--max-batch --memory 8GiB --limit-s 200 {UNFINISHED}"),
        score("compile", "jax", 440, jobs=4),
        score("compile", "jax", 440, "--largest"),
        plans("jax", 3, 300, "--models unet,plain_cnn,residual_batchnorm --shares 0.5,0.25", "plans-jax-conv", 40),
        host_fed("jax", 75),
        score("probe", "tensorflow-graph", 280, jobs=4, after=400),
        score("probe", "tensorflow-graph", 250, "--largest", jobs=5, after=400),
    ),
}


class Running:
    def __init__(self, job: Job, out: pathlib.Path, ready: str | None, until: float) -> None:
        self.job = job
        source = f". {ready}; " if ready and job.backend == "tensorflow" else ""
        env = os.environ | {"KERAS_BACKEND": job.backend, "O": str(out), "PYTHONUNBUFFERED": "1"}
        env |= {"TF_CPP_MIN_LOG_LEVEL": "2", "XDG_CACHE_HOME": f"{tempfile.gettempdir()}/cache-{job.name}"}
        with (out / f"{job.name}.log").open("w") as log:
            self.process = subprocess.Popen(
                ["bash", "-c", source + job.command], env=env, stdout=log, stderr=subprocess.STDOUT, process_group=0
            )
        self.until = min(time.monotonic() + job.limit, until)

    def over(self) -> bool:
        if self.process.poll() is not None:
            return True
        if time.monotonic() < self.until:
            return False
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program", choices=PROGRAMS)
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--alone", required=True, help="from which second to which")
    parser.add_argument("--ready", default=None)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    start, end = map(float, options.alone.split(","))
    waiting, running = list(PROGRAMS[options.program]), list[Running]()

    def say(text: str) -> None:
        with (options.out / "conduct.log").open("a") as log:
            log.write(f"{time.monotonic() - began:6.0f} s  {text}\n")

    while waiting or running:
        now = time.monotonic() - began
        if now > options.seconds:
            break
        quiet = start <= now < end and any(job.alone for job in waiting)
        for one in [one for one in running if one.over()]:
            running.remove(one)
            say(f"done {one.job.name}: {one.process.returncode}")
        for job in list(waiting):
            there = options.ready is None or job.backend != "tensorflow" or os.path.exists(options.ready)
            there = there and now >= job.after
            cores, card = (sum(getattr(one.job, what) for one in running) for what in ("cores", "card"))
            if job.alone:
                fits = quiet and not running
            else:
                fits = not quiet and not any(one.job.alone for one in running)
                fits = fits and cores + job.cores <= CORES and card + job.card <= CARD
            if there and fits:
                waiting.remove(job)
                # What only counts memory makes room when times are to be taken.
                soft = start + 20 if not job.alone and now < start else options.seconds
                running.append(Running(job, options.out, options.ready, began + soft))
                say(f"start {job.name}")
                break
        else:
            time.sleep(0.3)
    for one in running:
        one.until = 0
        one.over()
    say(f"not begun: {', '.join(job.name for job in waiting) or 'none'}")


if __name__ == "__main__":
    main()
