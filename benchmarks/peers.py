"""ResNet50 asked for batch 1024 on a card of 16 GB: oomproof beside what others do about running out of memory.

    KERAS_BACKEND=torch python benchmarks/peers.py              # on a GPU, with accelerate and lightning installed
    KERAS_BACKEND=torch python benchmarks/peers.py --tiny       # on a CPU, to see that it runs

All contestants train the same Keras model on torch, with Adam in float32, each in a process of its own whose memory is
capped (the figures of --tiny mean nothing). Those that end with a smaller batch are then given the accumulation that
makes up for it, by hand, as their documentation says, so that images per second are for batches of 1024 throughout.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

CONTESTANTS = ("halving", "accelerate", "lightning-power", "lightning-binsearch", "oomproof")
_GB = 10**9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--only", default=",".join(CONTESTANTS))
    parser.add_argument("--cap-gb", type=float, default=16)
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=5, help="batches of the size that was asked for")
    chosen = parser.parse_args()
    if not chosen.tiny and not _has_gpu():
        print("needs a GPU; --tiny shows that it runs", file=sys.stderr)
        return
    rows = []
    for name in chosen.only.split(","):
        command = [sys.executable, __file__, "--child", name, json.dumps(vars(chosen))]
        try:
            child = subprocess.run(
                command, env={**os.environ, "KERAS_BACKEND": "torch"}, capture_output=True, text=True, timeout=400
            )
            lines = child.stdout.strip().splitlines()
            ok = not child.returncode and lines
            row = json.loads(lines[-1]) if ok else {"error": child.stderr.strip()[-600:]}
        except subprocess.TimeoutExpired:
            row = {"error": "no answer within 400 s"}
        rows.append({"contestant": name, **row})
        print(rows[-1], file=sys.stderr, flush=True)
    from _common import write_result

    name = "peers-tiny" if chosen.tiny else "peers-gpu"
    write_result(name, {"asked_for": chosen.batch, "cap_gb": chosen.cap_gb, "rows": rows})


def _has_gpu() -> bool:
    from _common import environment

    return environment()["gpu"] is not None


# In the child


class Task:
    """The model, its data, and what a step of a peer's own loop is."""

    def __init__(self, options: Any) -> None:
        import keras
        import numpy as np
        import torch

        self.options = options
        self.device = "cpu" if options["tiny"] else "cuda"
        if not options["tiny"]:
            total = torch.cuda.get_device_properties(0).total_memory
            torch.cuda.set_per_process_memory_fraction(options["cap_gb"] * _GB / total)
        keras.utils.set_random_seed(0)
        size = 32 if options["tiny"] else 224
        self.model = keras.applications.ResNet50(
            weights=None, input_shape=(size, size, 3), classes=1000, classifier_activation=None
        )
        self.batch = int(options["batch"])
        rng = np.random.default_rng(0)
        self.x = rng.normal(size=(self.batch, size, size, 3)).astype("float32")
        self.y = rng.integers(0, 1000, self.batch)
        self.optimizer = torch.optim.Adam(self.model.parameters(), 1e-3)
        self.loss = torch.nn.CrossEntropyLoss()
        self.failures = 0

    def gradients(self, start: int, size: int, share: float) -> None:
        import torch

        x = torch.from_numpy(self.x[start : start + size]).to(self.device)
        y = torch.from_numpy(self.y[start : start + size]).to(self.device)
        (self.loss(self.model(x, training=True), y) * share).backward()

    def step(self, size: int) -> None:
        """A batch of the size that was asked for, in pieces of `size`, accumulated by hand."""
        self.optimizer.zero_grad()
        for start in range(0, self.batch, size):
            self.gradients(start, size, min(size, self.batch - start) / self.batch)
        self.optimizer.step()
        self.wait()

    def small_step(self, size: int) -> None:
        """A step of the smaller batch alone, which is what the finders try."""
        self.optimizer.zero_grad()
        self.gradients(0, size, 1.0)
        self.optimizer.step()
        self.wait()

    def wait(self) -> None:
        if self.device == "cuda":
            import torch

            torch.cuda.synchronize()

    def is_memory(self, error: BaseException) -> bool:
        import torch

        # On a CPU nothing runs out, so the tiny version pretends: a batch above 16 is too much.
        return isinstance(error, torch.OutOfMemoryError) or "CUDA out of memory" in str(error)

    def pretend(self, size: int) -> None:
        if self.options["tiny"] and size > 16:
            raise RuntimeError("CUDA out of memory. (pretended)")


def halving(task: Task) -> int:
    size = task.batch
    while True:
        try:
            task.pretend(size)
            task.small_step(size)
            return size
        except RuntimeError as error:
            if not task.is_memory(error):
                raise
        task.failures += 1
        size //= 2
        gc.collect()
        torch_cache()


def accelerate(task: Task) -> int:
    from accelerate.utils import find_executable_batch_size

    @find_executable_batch_size(starting_batch_size=task.batch)  # type: ignore[untyped-decorator]
    def inner(batch_size: int) -> int:
        try:
            task.pretend(batch_size)
            task.small_step(batch_size)
        except RuntimeError:
            task.failures += 1
            raise
        return batch_size

    return int(inner())


def lightning(task: Task, mode: str) -> int:
    import lightning as pl
    import torch
    from lightning.pytorch.tuner import Tuner

    class Module(pl.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.batch_size = 2
            self.inner = task.model

        def training_step(self, batch: Any, _: int) -> Any:
            x, y = batch
            try:
                task.pretend(len(x))
                return task.loss(self.inner(x, training=True), y)
            except RuntimeError:
                task.failures += 1
                raise

        def train_dataloader(self) -> Any:
            data = torch.utils.data.TensorDataset(torch.from_numpy(task.x), torch.from_numpy(task.y))
            return torch.utils.data.DataLoader(data, batch_size=self.batch_size)

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters(), 1e-3)

    trainer = pl.Trainer(
        max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False, accelerator="auto", devices=1
    )
    module = Module()
    found = Tuner(trainer).scale_batch_size(module, mode=mode, init_val=2, max_trials=25, steps_per_trial=1)
    task.model.to(task.device)
    return min(int(found or module.batch_size), task.batch)


def _holding(task: Task, size: int) -> int:
    """The size that was found, or what is left of it: what fits once need not fit when gradients are added up."""
    while True:
        try:
            task.step(size)
            return size
        except RuntimeError as error:
            if not task.is_memory(error):
                raise
        task.failures += 1
        size = int(size * 0.9)
        gc.collect()
        torch_cache()


def torch_cache() -> None:
    import torch

    torch.cuda.empty_cache()


def _peer(task: Task, find: Callable[[Task], int]) -> dict[str, Any]:
    began = time.perf_counter()
    found = size = find(task)
    task.small_step(size)
    first = time.perf_counter() - began
    size = _holding(task, size)
    began = time.perf_counter()
    for _ in range(task.options["steps"]):
        task.step(size)
    seconds = (time.perf_counter() - began) / task.options["steps"]
    return {
        "failures": task.failures,
        "batch": found,
        "keeps_batch": found == task.batch,
        "seconds_to_first_step": first,
        "images_per_second": task.batch / seconds,
        "by_hand": "" if size == task.batch else f"accumulation over {-(-task.batch // size)} steps of {size}",
    }


def _oomproof(task: Task) -> dict[str, Any]:
    import keras

    import oomproof
    from oomproof import _backends as backends

    kind = type(backends.current().memory())
    shortage = kind.shortage

    def counting(self: Any, error: BaseException) -> Any:
        found = shortage(self, error)
        task.failures += found is not None
        return found

    setattr(kind, "shortage", counting)  # noqa: B010
    times: list[float] = []
    watch = keras.callbacks.LambdaCallback(on_train_batch_end=lambda *_, **__: times.append(time.perf_counter()))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    task.model.compile(keras.optimizers.Adam(1e-3), loss)

    class Batches(keras.utils.PyDataset):  # type: ignore[misc]
        def __len__(self) -> int:
            return int(task.options["steps"]) + 2

        def __getitem__(self, index: int) -> Any:
            return task.x, task.y

    began = time.perf_counter()
    try:
        run = oomproof.fit(task.model, Batches(), epochs=1, verbose=0, callbacks=[watch]).run
    except oomproof.RecoveryFailedError as error:
        events = [] if error.run is None else [event.message for event in error.run.events]
        return {"failures": task.failures, "gave_up": str(error), "events": events}
    return {
        "failures": task.failures,
        "batch": task.batch,
        "keeps_batch": True,
        "seconds_to_first_step": times[0] - began,
        "images_per_second": task.batch * (len(times) - 2) / (times[-1] - times[1]),
        "plan": run.plan.sentence,
        "events": [event.message for event in run.events],
        "peak": run.peak,
        "by_hand": "",
    }


def _child(name: str, options: Any) -> dict[str, Any]:
    task = Task(options)
    if name == "oomproof":
        return _oomproof(task)
    if name.startswith("lightning"):
        return _peer(task, lambda task: lightning(task, name.partition("-")[2]))
    return _peer(task, {"halving": halving, "accelerate": accelerate}[name])


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        print(json.dumps(_child(sys.argv[2], json.loads(sys.argv[3]))))
    else:
        main()
