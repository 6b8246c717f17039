"""What XLA says a step of TensorFlow needs, compiled for a GPU that need not be there. Nothing is run.

TensorFlow lowers the step, variables and all, and says in the program which results take the place of which variables.
It keeps its own plan to itself, so the program is handed to the compiler that JAX comes with, which is the same one of
another version.
"""

from __future__ import annotations

import dataclasses
import math
import re
import time
from typing import Any

from oomproof._records.trace import Compiled, Workload
from oomproof._simulators.tensorflow.stablehlo_step import stablehlo_step
from oomproof._simulators.tensorflow.trace import compiled_step_trace
from oomproof._simulators.xla.compile_process import compiled_in_process, why_not_in_process

# Not an op of StableHLO, though TensorFlow writes it. A reshape to the same shape computes the same.
_COPY = re.compile(r"mhlo\.copy (%\w+) : (tensor<[^>]*>)")
_TRUTHS = re.compile(r'dense<"0x([0-9A-Fa-f]*)"> : tensor<((?:\d+x)+)i1>')


def why_not(workload: Workload) -> str | None:
    """`None` where the step can be compiled for its target, else what is missing, in words."""
    return why_not_in_process(workload.target)


def compile_step(model: Any, workload: Workload, memory: int | None = None) -> Compiled:
    """Compiles the step Keras would run.

    Args:
        model: A model that is built and compiled. It stays as it was; slots it has not got yet are made for the time
            being, since TensorFlow lowers no program whose variables have no values.
        workload: The step.
        memory: Bytes of the GPU.

    Raises:
        BackendError: When the packages that compile are missing, or XLA fails at it.
        UnsupportedModelError: When TensorFlow cannot lower the step.
    """
    start = time.perf_counter()
    step = stablehlo_step(model, workload)
    text = _COPY.sub(r"stablehlo.reshape \1 : (\2) -> \2", step.text)
    text = _TRUTHS.sub(_a_byte_each, text)
    found = compiled_in_process(text, workload.target, memory)
    trace = compiled_step_trace(step, workload)
    return dataclasses.replace(found, trace=trace, seconds=time.perf_counter() - start)


def _a_byte_each(found: re.Match[str]) -> str:
    """A constant of truth values, such as a mask. TensorFlow writes eight of them to a byte, JAX reads one."""
    packed, count = bytes.fromhex(found[1]), math.prod(int(n) for n in found[2].split("x") if n)
    if len(packed) >= count:
        return found[0]
    bits = "".join(f"{byte >> bit & 1:02X}" for byte in packed for bit in range(8))
    return f'dense<"0x{bits[: 2 * count]}"> : tensor<{found[2]}i1>'
