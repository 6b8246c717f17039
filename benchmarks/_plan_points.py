"""What the child processes of plan_times.py measure: the points of one model, printed as JSON lines as they come."""

from __future__ import annotations

import gc
import json
import statistics
import time
from typing import Any

WARM_UP = 2
Record = dict[str, Any]


def key_of(record: Record) -> tuple[int, tuple[str, ...], bool]:
    return record["micro"], tuple(record["recompute"]), record["lean"]


class Points:
    """Measures points of one model, each once and with a model of its own."""

    def __init__(self, options: Record) -> None:
        # Keras chooses its backend when it is imported, so the parent imports none of this.
        import keras
        import numpy as np

        from _plan_zoo import ZOO
        from oomproof import _backends as backends

        self.options = options
        self.end: float = time.monotonic() + options["seconds"]
        self.device = "cpu" if options["tiny"] else "gpu"
        self.backend = keras.backend.backend()
        self.memory: Any = backends.current().memory
        self.make: Any = ZOO[options["model"]]
        case = self.fresh()
        self.batch = case.batch
        ((shape, dtype, most),) = case.data
        rng = np.random.default_rng(0)
        shape = (case.batch, *shape)
        self.x = rng.integers(1, most, shape).astype(dtype) if most else rng.normal(size=shape).astype(dtype)
        self.y = rng.integers(0, case.classes, (case.batch, 1))
        self.done: set[Any] = set()

    def fresh(self) -> Any:
        """The model anew, with the names it had before: layers are counted from the beginning again."""
        import keras

        keras.utils.clear_session(free_memory=True)
        gc.collect()
        if self.backend == "torch" and self.device == "gpu":
            import torch

            torch.cuda.empty_cache()
        keras.utils.set_random_seed(1)
        return self.make(not self.options["tiny"])

    @property
    def late(self) -> bool:
        return time.monotonic() > self.end

    def measured(self, plan: Any, compile_s: float | None = None) -> Record:
        """Seconds and peak of a step, plain where there is no plan; why not, where that cannot be had."""
        import oomproof

        try:
            return self._measured(plan, compile_s)
        except oomproof.OomproofError as error:
            return {"oom": str(error)[:300]}
        except Exception as error:
            short = self.memory().shortage(error)
            text = f"{type(error).__name__}: {error}"[:600]
            return {"error": text} if short is None else {"oom": short.text}

    def _measured(self, plan: Any, compile_s: float | None) -> Record:
        import oomproof
        from _steppers import stepper_class

        model = self.fresh().model
        if plan is not None:
            oomproof.guard(model, plan=plan, verbose=0)
        stepper = stepper_class()(model, self.x, self.y, self.device)
        found: Record = {"first_step_seconds": stepper.first_step_seconds}
        if compile_s is not None and stepper.first_step_seconds > compile_s:
            return found | {"error": f"skipped: the first step took {stepper.first_step_seconds:.0f} s"}
        for _ in range(WARM_UP):
            stepper.step()
        times = [stepper.step() for _ in range(self.options["steps"])]
        resident, peak = self._peak(stepper)
        if plan is not None:
            ran = vars(model)["_oomproof_guard"]._ready().plan
            if (ran.micro_batch_size or self.batch) != (plan.micro_batch_size or self.batch):
                return found | {"oom": f"ran out of memory and went on in pieces of {ran.micro_batch_size}"}
        return found | {
            "seconds": statistics.median(times),
            "quickest": min(times),
            "slowest": max(times),
            "peak": peak,
            "resident": resident,
        }

    def _peak(self, stepper: Any) -> tuple[int | None, int | None]:
        """All that is in use between steps, and at the worst moment of one."""
        memory = self.memory()
        gc.collect()
        if self.backend == "jax":
            beyond = stepper.peak()
            resident = memory.usage().current
            return resident, resident + beyond
        before, peak = memory.usage(), 0
        if before is None:
            return None, None
        for _ in range(3):  # Keras leaves cycles behind that hold tensors, so steps differ.
            memory.reset_peak()
            stepper.run()
            peak = max(peak, memory.usage().peak)
        return before.current, peak

    def point(self, level: str, micro: int, recompute: tuple[str, ...], *, lean: bool, on_grid: bool) -> None:
        import oomproof

        record = {"what": "point", "level": level, "micro": micro, "recompute": recompute, "lean": lean}
        if key_of(record) in self.done:
            return
        self.done.add(key_of(record))
        pieces = micro if micro < self.batch else None
        plan = oomproof.Plan(micro_batch_size=pieces, recompute=recompute, lean_commit=lean)
        # What the planner chose is timed however long it takes to compile.
        found = self.measured(plan, self.options["compile_s"] if level != "plan" else None)
        say(record | {"on_grid": on_grid} | found)

    def levels(self) -> list[tuple[str, tuple[str, ...]]]:
        """Names and labels of the sets to recompute, with those that keep more first."""
        from oomproof import _backends as backends
        from oomproof._estimation.modes import is_compiled
        from oomproof._estimation.workloads import describe
        from oomproof._planning import remat
        from oomproof._planning.levers import allowed
        from oomproof._planning.planner import Planner
        from oomproof._records.trace import Target

        model, backend = self.fresh().model, backends.current()
        workload = describe(model, self.batch, "train", is_compiled(model, backend), Target(True, (9, 0)))
        segments = Planner(backend, model, allowed("default"), cache=False)._way(workload, own=True).chain.segments
        smallest = remat.least(segments)
        low, high = remat.peak(segments, smallest), remat.peak(segments, ())
        count = max(1, self.options["levels"])
        found: list[tuple[str, remat.Runs | None]] = [("none", ())]
        for part in range(count - 1, 0, -1):
            found.append((f"cap {part}/{count}", remat.choose(segments, low + (high - low) * part // count)))
        found.append(("smallest", smallest))
        found.append(("everything", tuple((i, i + 1) for i, each in enumerate(segments) if each.recomputable)))
        named: dict[tuple[str, ...], str] = {}
        predicted = {}
        for name, runs in found:
            if runs is not None:
                labels = tuple(remat.label(segments[start:end]) for start, end in runs)
                named.setdefault(labels, name)
                predicted[name] = remat.peak(segments, runs)
        sets = [(name, labels) for labels, name in named.items()]
        say({"what": "levels", "sets": dict(sets), "predicted_of_stretches": predicted})
        return sets

    def plan(self, share: float, whole: int) -> Any:
        import oomproof

        record = {"what": "plan", "share": share, "budget": int(whole * share), "batch": self.batch}
        began = time.perf_counter()
        try:
            plan = oomproof.plan(self.fresh().model, self.batch, budget=record["budget"], cache=False)
        except oomproof.CannotFitError as error:
            say(record | {"cannot_fit": str(error)[:600]})
            return None
        except Exception as error:
            say(record | {"error": f"{type(error).__name__}: {error}"[:600]})
            return None
        say(
            record
            | {
                "sentence": plan.sentence,
                "micro": plan.micro_batch_size or self.batch,
                "recompute": plan.recompute,
                "lean": plan.lean_commit,
                "predicted": plan.predicted,
                "relative_time": plan.relative_time,
                "caveats": plan.caveats,
                "seconds_to_plan": time.perf_counter() - began,
            }
        )
        return plan

    def run(self) -> None:
        import oomproof
        from oomproof._backends.common.model import statistics_caveat

        plain = self.measured(None)
        say({"what": "plain", "batch": self.batch, **plain})
        if "seconds" not in plain:
            return
        model = self.fresh().model
        caveats = statistics_caveat(model)
        # A CPU may not say what is in use; then the estimate stands for it, so that there is something to plan for.
        whole = plain["peak"] or oomproof.estimate(model, self.batch, memory="1024GiB", engine="trace").expected
        del model
        plans = [self.plan(float(share), whole) for share in self.options["shares"].split(",")]
        sets = self.levels()
        counts = [1] if caveats else [int(count) for count in self.options["micros"].split(",")]
        micros = list(dict.fromkeys(max(1, self.batch // count) for count in counts))
        # Along the diagonals, so that what there is time for is spread over both.
        grid = [(a + b, set_, micro) for a, set_ in enumerate(sets) for b, micro in enumerate(micros)]
        grid.sort(key=lambda each: each[0])
        on_grid = {(micro, labels) for _, (_, labels), micro in grid}
        say({"what": "grid", "points": len(grid), "micros": micros, "recompute_only": caveats})
        for plan in plans:
            if plan is not None and not self.late:
                micro, labels = plan.micro_batch_size or self.batch, plan.recompute
                there = (micro, labels) in on_grid and not plan.lean_commit
                self.point("plan", micro, labels, lean=plan.lean_commit, on_grid=there)
        for at, (_, (level, labels), micro) in enumerate(grid):
            if self.late:
                say({"what": "cut short", "points_not_measured": len(grid) - at})
                return
            self.point(level, micro, labels, lean=False, on_grid=True)


def say(record: Record) -> None:
    print("\n" + json.dumps(record), flush=True)
