"""What XLA says a step of TensorFlow needs, compiled for a GPU that need not be there. Nothing is run.

TensorFlow lowers the step, variables and all, and says in the program which results take the place of which variables.
It keeps its own plan to itself, so the program is handed to the compiler that JAX comes with, which is the same one of
another version.
"""

from __future__ import annotations

import math
import re
import time
from typing import Any

from oomproof.backends.tensorflow.lowered import lowered
from oomproof.errors import BackendError
from oomproof.tracing import Compiled, Workload

# Not an op of StableHLO, though TensorFlow writes it. A reshape to the same shape computes the same.
_COPY = re.compile(r"mhlo\.copy (%\w+) : (tensor<[^>]*>)")
_TRUTHS = re.compile(r'dense<"0x([0-9A-Fa-f]*)"> : tensor<((?:\d+x)+)i1>')


def why_not(workload: Workload) -> str | None:
    """`None` where the step can be compiled for its target, else what is missing, in words."""
    try:
        from oomproof.backends.xla.absent import absent_gpu
    except ImportError:
        return "compiling needs JAX and its CUDA compiler: pip install 'oomproof[gpu-compile]'"
    try:
        absent_gpu(workload.target)
    except BackendError as error:
        return str(error)
    return None


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
    from jax._src import compiler
    from jax._src.interpreters import mlir
    from jaxlib.mlir import ir

    from oomproof.backends.xla.absent import WITHOUT_TILES, WITHOUT_TILES_NOTE, absent_gpu, account, not_compiled

    device = absent_gpu(workload.target, memory)
    start = time.perf_counter()
    text = _COPY.sub(r"stablehlo.reshape \1 : (\2) -> \2", lowered(model, workload).text)
    text = _TRUTHS.sub(_a_byte_each, text)
    with mlir.make_ir_context():
        module = ir.Module.parse(text)
    notes: tuple[str, ...] = ()
    options = compiler.get_compile_options(num_replicas=1, num_partitions=1)
    devices = compiler.xc.DeviceList((device,))
    try:
        program = device.client.compile(module, devices, options)
    except Exception:
        options = compiler.get_compile_options(
            num_replicas=1, num_partitions=1, env_options_overrides={k: str(v) for k, v in WITHOUT_TILES.items()}
        )
        notes = (WITHOUT_TILES_NOTE,)
        try:
            program = device.client.compile(module, devices, options)
        except Exception as error:
            raise not_compiled(error) from error
    return account(program.get_compiled_memory_stats(), False, time.perf_counter() - start, notes)


def _a_byte_each(found: re.Match[str]) -> str:
    """A constant of truth values, such as a mask. TensorFlow writes eight of them to a byte, JAX reads one."""
    packed, count = bytes.fromhex(found[1]), math.prod(int(n) for n in found[2].split("x") if n)
    if len(packed) >= count:
        return found[0]
    bits = "".join(f"{byte >> bit & 1:02X}" for byte in packed for bit in range(8))
    return f'dense<"0x{bits[: 2 * count]}"> : tensor<{found[2]}i1>'
