"""One training of plans.py or unseen.py, in a process of its own: from cold, under a limit that is real or none."""

from __future__ import annotations

import json
import logging
import os
import pathlib
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

STEPS = 3
# Numbers that NumPy does not know by name.
_ITEM = {"bfloat16": "float16"}
_MIB = 2**20


def asked_of_child(
    arguments: list[str], backend: str, device: str, limit: int, folder: str, patience: int
) -> dict[str, Any]:
    """What a child process answers in its last line; its last words as `error` if it ends without."""
    env = {**os.environ, "KERAS_BACKEND": backend, "TF_CPP_MIN_LOG_LEVEL": "3", "XDG_CACHE_HOME": folder}
    if device == "cpu":
        env |= {"TF_CPU_ALLOCATOR_USE_BFC": "true", "TF_ENABLE_ONEDNN_OPTS": "0"}
        env["TF_CPU_BFC_MEM_LIMIT_IN_MB"] = str(limit // _MIB if limit else 8192)
    elif backend == "jax":
        env["XLA_PYTHON_CLIENT_MEM_FRACTION"] = str(limit / gpu_bytes()) if limit else "0.4"
        # Without a limit only what is needed is taken, for others run beside it.
        env["XLA_PYTHON_CLIENT_PREALLOCATE"] = str(bool(limit)).lower()
    elif backend == "tensorflow" and not limit:
        env["TF_FORCE_GPU_ALLOW_GROWTH"] = "true"
    try:
        child = subprocess.run([sys.executable, *arguments], env=env, capture_output=True, text=True, timeout=patience)
    except subprocess.TimeoutExpired:
        return {"error": f"no answer within {patience} s"}
    if child.returncode:
        return {"error": f"exit {child.returncode}: " + "\n".join(child.stderr.strip().splitlines()[-3:])[-600:]}
    answer: dict[str, Any] = json.loads(child.stdout.strip().splitlines()[-1])
    return answer


def gpu_bytes() -> int:
    command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[0]) * _MIB


def trained(
    name: str,
    make: Callable[[], Any],
    limit: int,
    device: str,
    jit: str,
    folder: str,
    budget: int = 0,
    without: str = "",
) -> dict[str, Any]:
    """What became of it. Without a limit (0), the weights it ends with are left in the folder for the others.

    A `budget` takes the place of the limit, which then is not real. Levers named in `without` are not allowed.
    """
    import keras

    from oomproof import _backends as backends

    if device == "gpu" and limit and not budget:
        cap(keras.backend.backend(), limit)
    keras.utils.set_random_seed(1)
    case = make()
    if jit != "auto":
        case.model.compile(case.model.optimizer, case.model.loss, jit_compile=jit == "on")
    path = pathlib.Path(folder) / f"{name}.npz"
    memory = backends.current().memory()
    return _limited(case, memory, path, budget or None, without) if limit else _unlimited(case, memory, path)


def cap(backend: str, limit: int) -> None:
    """A small card out of a large one."""
    if backend == "tensorflow":
        import tensorflow as tf

        configuration = tf.config.LogicalDeviceConfiguration(memory_limit=limit // _MIB)
        tf.config.set_logical_device_configuration(tf.config.list_physical_devices("GPU")[0], [configuration])
    elif backend == "torch":
        import torch

        torch.cuda.set_per_process_memory_fraction(limit / torch.cuda.get_device_properties(0).total_memory)


def _batches(case: Any, batch: int = 0) -> Any:
    import keras
    import numpy as np

    class Batches(keras.utils.PyDataset):  # type: ignore[misc]
        def __len__(self) -> int:
            return STEPS

        def __getitem__(self, index: int) -> Any:
            rng = np.random.default_rng(index)

            def drawn(like: Any, least: int) -> Any:
                made = [
                    rng.integers(least, most, (batch or case.batch, *shape)).astype(dtype)
                    if most
                    else rng.normal(size=(batch or case.batch, *shape)).astype(dtype)
                    for shape, dtype, most in like
                ]
                return made[0] if len(made) == 1 else tuple(made)

            return drawn(case.data, 1), drawn(case.targets or [((1,), "int64", case.classes)], 0)

    return Batches()


def _unlimited(case: Any, memory: Any, path: pathlib.Path) -> dict[str, Any]:
    import keras
    import numpy as np

    import oomproof

    began, first, last = time.perf_counter(), _first_step(memory), _last_step()
    memory.reset_peak()
    options: dict[str, Any] = {"epochs": 1, "shuffle": False, "verbose": 0, "callbacks": [first, last]}
    before = case.model.get_weights() if case.model.built else []
    if keras.backend.backend() == "jax":
        # JAX cannot forget a peak, and finding the quickest kernels takes memory too: what XLA says counts.
        peak = oomproof.fit(case.model, _batches(case), **options, plan=oomproof.Plan()).run.peak
    else:
        case.model.fit(_batches(case), **options)
        use = memory.usage()
        peak = None if use is None else use.peak
    after = case.model.get_weights()
    np.savez(path, *after)
    moved = float(
        sum(np.square(a - b, dtype="float64").sum() for a, b in zip(before, after, strict=bool(before))) ** 0.5
    )
    found = {"peak": peak, "first_peak": first.peak, "moved": moved, "floor": _floor(case.model)}
    if memory.describe().name.startswith("CPU") and peak is not None:
        # What TensorFlow's convolutions work in on a CPU is as much for one sample as for many: 30 MB a gradient.
        memory.reset_peak()
        case.model.fit(_batches(case, batch=1), epochs=1, verbose=0)
        found["floor"] = max(found["floor"], memory.usage().peak)
    return found | {"seconds": time.perf_counter() - began, "step_seconds": last.seconds}


def _first_step(memory: Any) -> Any:
    """A callback that keeps the peak of the first step apart, in which kernels are looked for."""
    import keras

    class FirstStep(keras.callbacks.Callback):  # type: ignore[misc]
        peak: int | None = None

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if not batch:
                use = memory.usage()
                self.peak = None if use is None else use.peak
                memory.reset_peak()

    return FirstStep()


def _last_step() -> Any:
    """A callback that keeps how long the last step took."""
    import keras

    class LastStep(keras.callbacks.Callback):  # type: ignore[misc]
        seconds = 0.0

        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            self._began = time.perf_counter()

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if logs:
                float(logs["loss"])
            self.seconds = time.perf_counter() - self._began

    return LastStep()


def _floor(model: Any) -> int:
    """Bytes below which nothing can train it: weights, optimizer slots, and gradients where they are dense."""
    import keras

    def taken(variables: Any) -> int:
        return sum(int(np.prod(v.shape)) * np.dtype(_ITEM.get(str(v.dtype), str(v.dtype))).itemsize for v in variables)

    import numpy as np

    sparse = keras.backend.backend() == "tensorflow"
    rows = {
        id(v)
        for layer in model._flatten_layers()
        if sparse and isinstance(layer, keras.layers.Embedding)
        for v in layer.weights
    }
    dense = [v for v in model.trainable_variables if id(v) not in rows]
    return taken(model.variables) + taken(model.optimizer.variables) + taken(dense)


class Watch:
    """Counts failures where the framework raises them, and hears what the planner says before the first step."""

    def __init__(self) -> None:
        self.failures, self.refused, self.hopeless = 0, 0, False
        self.texts: list[str] = []
        self.said: list[str] = []

    def count(self, kind: Any) -> None:
        """Failed probes count too: they wait as long as failed steps. What XLA is known to need before it runs, and is
        then not run, is no failure."""
        shortage = kind.shortage

        def counting(memory: Any, error: BaseException) -> Any:
            found = shortage(memory, error)
            if found is not None:
                self.failures += type(error).__name__ != "NotEnoughMemoryError"
                self.refused += type(error).__name__ == "NotEnoughMemoryError"
                self.texts.append(found.text[:600])
            return found

        kind.shortage = counting

    def heed(self) -> None:
        """Nothing fits, or nothing fits unless the planner's estimate is too high."""
        from oomproof._planning.planner import Planner

        propose = Planner.propose

        def heeding(planner: Any, *args: Any) -> Any:
            found = propose(planner, *args)
            self.hopeless |= found is not None and (found.predicted or 0) > (found.limit or 0)
            return found

        def listening(record: logging.LogRecord) -> bool:
            self.hopeless |= "will not fit" in record.getMessage()
            self.said.append(record.getMessage()[:600])
            return True

        setattr(Planner, "propose", heeding)  # noqa: B010
        logging.getLogger("oomproof").addFilter(listening)


def _limited(case: Any, memory: Any, path: pathlib.Path, budget: int | None, without: str) -> dict[str, Any]:
    import oomproof

    levers = {"microbatch", "recompute", "head", "batch_statistics"}
    allow = levers - set(without.split(",")) if without else "default"

    began, watch, last = time.perf_counter(), Watch(), _last_step()
    watch.count(type(memory))
    watch.heed()
    try:
        run = oomproof.fit(
            case.model, _batches(case), epochs=1, shuffle=False, verbose=0, budget=budget, allow=allow, callbacks=[last]
        ).run
    except oomproof.CannotFitError as error:
        return {"cannot_fit": str(error), "failures": watch.failures, "floor": _floor(case.model)}
    except oomproof.RecoveryFailedError as error:
        events = [event.message for event in error.run.events] if error.run is not None else []
        return {
            "gave_up": str(error),
            "failures": watch.failures,
            "events": events,
            "said": watch.said,
            "floor": _floor(case.model),
            "said_that_it_will_not_fit": watch.hopeless,
            "shortages": watch.texts,
        }
    times = {"seconds": time.perf_counter() - began, "step_seconds": last.seconds, "budget": budget}
    return _outcome(case, run, watch, path) | times


def _outcome(case: Any, run: Any, watch: Watch, path: pathlib.Path) -> dict[str, Any]:
    import numpy as np

    plain = np.load(path).values() if path.exists() else []
    pairs = list(zip(plain, case.model.get_weights(), strict=path.exists()))
    return {
        "finished": True,
        "updates": int(case.model.optimizer.iterations),
        "said_that_it_will_not_fit": watch.hopeless,
        "failures": watch.failures,
        "refused_before_they_ran": watch.refused,
        "shortages": watch.texts,
        "ooms": run.ooms,
        "peak": run.peak,
        "reserved": _reserved(),
        "difference": max((float(np.abs(a - b).max()) for a, b in pairs if a.size), default=None),
        # Beside `moved` of the plain run, which is how far the weights went in all.
        "distance": _distance(pairs),
        "floor": _floor(case.model),
        "exact": not run.plan.caveats,
        "exactness": str(run.exactness),
        "predicted": run.plan.predicted,
        "micro_batch_size": run.plan.micro_batch_size,
        "recomputed": len(run.plan.recompute),
        "segments": run.plan.segments,
        "events": [event.message for event in run.events],
        "said": watch.said,
        "last_event": run.events[-1].message if run.events else "",
    }


def _distance(pairs: list[tuple[Any, Any]]) -> float | None:
    import numpy as np

    return float(sum(np.square(a - b, dtype="float64").sum() for a, b in pairs) ** 0.5) if pairs else None


def _reserved() -> int | None:
    """Bytes that torch's allocator took from the card, at most."""
    import keras

    if keras.backend.backend() != "torch":
        return None
    import torch

    return torch.cuda.max_memory_reserved() if torch.cuda.is_available() else None
