"""One step of a model the way `fit` runs it on each backend, timed, and its peak memory."""

from __future__ import annotations

import abc
import itertools
import time
from typing import Any

import keras


class Stepper(abc.ABC):
    """A model with one batch that it trains on again and again.

    Attributes:
        peak_is: What `peak` measures on this backend, in words.
    """

    peak_is = ""

    def __init__(self, model: Any, x: Any, y: Any, device: str) -> None:
        self.model = model
        self.device = device
        self.place(x, y)
        began = time.perf_counter()
        self.fit(1)
        self.first_step_seconds = time.perf_counter() - began

    def place(self, x: Any, y: Any) -> None:
        """Puts the batch where the device can read it, so that copying it is not part of a step."""
        self.data = (x, y)

    def dataset(self, steps: int) -> Any:
        return (self.data for _ in itertools.count())

    def fit(self, steps: int) -> float:
        """Seconds a step takes inside of `fit`."""
        began = time.perf_counter()
        self.model.fit(self.dataset(steps), steps_per_epoch=steps, verbose=0)
        return (time.perf_counter() - began) / steps

    def step(self) -> float:
        """Seconds of one step, waited for."""
        began = time.perf_counter()
        self.run()
        return time.perf_counter() - began

    @abc.abstractmethod
    def run(self) -> None:
        """One step, waited for."""

    @abc.abstractmethod
    def peak(self) -> int:
        """Bytes a step takes beyond what is there before and after it."""

    def close(self) -> None:
        del self.model


class TensorFlowStepper(Stepper):
    peak_is = "peak of the allocator during a step, beyond what is in use before it"

    def place(self, x: Any, y: Any) -> None:
        import tensorflow as tf

        self.name = "GPU:0" if self.device == "gpu" else "CPU:0"
        self.source = tf.data.Dataset.from_tensors((x, y)).repeat()
        self.iterator = iter(self.source)

    def dataset(self, steps: int) -> Any:
        return self.source

    def run(self) -> None:
        float(self.model.train_function(self.iterator)["loss"])

    def peak(self) -> int:
        import tensorflow as tf

        found = []
        for _ in range(3):
            tf.config.experimental.reset_memory_stats(self.name)
            before = tf.config.experimental.get_memory_info(self.name)["current"]
            self.run()
            found.append(int(tf.config.experimental.get_memory_info(self.name)["peak"] - before))
        return max(found)


class TorchStepper(Stepper):
    peak_is = "peak of the allocator during a step, beyond what is in use before it (0 on CPU: not measurable)"

    def place(self, x: Any, y: Any) -> None:
        self.data = (keras.ops.convert_to_tensor(x), keras.ops.convert_to_tensor(y))

    def run(self) -> None:
        float(self.model.train_function([self.data])["loss"])
        if self.device == "gpu":
            import torch

            torch.cuda.synchronize()

    def peak(self) -> int:
        if self.device == "cpu":
            return 0
        import torch

        # Plain Keras keeps the gradients of the last step; a step's own are then not counted as its need.
        self.model.zero_grad()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        self.run()
        return int(torch.cuda.max_memory_allocated() - before)


class JaxStepper(Stepper):
    peak_is = "temporaries and results of the compiled programs, from XLA's own plan"

    def place(self, x: Any, y: Any) -> None:
        import jax

        self.data = (jax.device_put(x), jax.device_put(y))
        self.state: Any = None

    def fit(self, steps: int) -> float:
        self.model.jax_state_sync()
        self.state = None
        return super().fit(steps)

    def _state(self) -> Any:
        names = ("trainable_variables", "non_trainable_variables", "optimizer_variables", "metrics_variables")
        return self.model._get_jax_state(**dict.fromkeys(names, True), purge_model_variables=True)

    def run(self) -> None:
        if self.state is None:
            self.state = self._state()
        logs, self.state = self.model.train_function(self.state, iter([self.data]))
        float(logs["loss"])
        self._put_back()

    def _put_back(self) -> None:
        names = ("trainable_variables", "non_trainable_variables", "optimizer_variables", "metrics_variables")
        self.model._jax_state = dict(zip(names, self.state, strict=True))
        self.model._jax_state_synced = False

    def peak(self) -> int:
        import jax

        guard = vars(self.model).get("_oomproof_guard")
        if guard is not None:
            # Those of proofs are kept beside them, each with what runs it.
            programs = [each for each in guard._ready().step._programs.values() if not isinstance(each, tuple)]
            return int(max(program.needs() for program in programs))
        self.run()
        compiled = jax.jit(self.model.train_step, donate_argnums=0).lower(self.state, self.data).compile()
        analysis = compiled.memory_analysis()
        return int(analysis.temp_size_in_bytes + analysis.output_size_in_bytes - analysis.alias_size_in_bytes)


def stepper_class() -> type[Stepper]:
    return {"tensorflow": TensorFlowStepper, "torch": TorchStepper, "jax": JaxStepper}[keras.backend.backend()]
