"""What XLA says a step needs once it is compiled: for the GPU at hand, or for one that is not there. Nothing is run."""

from __future__ import annotations

import time
from typing import Any

import jax

from oomproof._records.trace import Compiled, Workload
from oomproof._simulators.jax.keras_step import keras_step
from oomproof._simulators.xla.compile_only_gpu import (
    WITHOUT_TILES,
    WITHOUT_TILES_NOTE,
    account,
    compile_only_gpu,
    not_compiled,
)
from oomproof.errors import BackendError


def compile_step(model: Any, workload: Workload, memory: int | None = None) -> Compiled:
    """Compiles the step Keras would run, from shapes alone.

    Args:
        model: A compiled Keras model whose weights are there. It stays as it was.
        workload: The step. For `target.gpu` it is compiled for the GPU at hand if it is of that architecture, else for
            one that is not there; otherwise for the CPU.
        memory: Bytes of the GPU that is not there.

    Raises:
        BackendError: When the packages to compile for a GPU that is not there are missing, the architecture is
            unknown, or XLA fails at it.
    """
    device = _device(workload, memory)
    here = device in jax.devices()
    start = time.perf_counter()
    with keras_step(model, workload) as step:
        sharding = jax.sharding.SingleDeviceSharding(device)
        state, data = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), (step.state, step.data)
        )
        # Not `step.function` itself: JAX remembers what it traced by function, and the model may have changed since.
        function = jax.jit(lambda state, data: step.function(state, data), donate_argnums=0)
        program, notes = _compiled(function.lower(state, data), here)
    tuned = here and workload.target.gpu
    return account(program.memory_analysis(), tuned, time.perf_counter() - start, (*step.notes, *notes))


def _compiled(lowered: Any, here: bool) -> tuple[Any, tuple[str, ...]]:
    try:
        return lowered.compile(), ()
    except jax.errors.JaxRuntimeError:
        if here:
            raise
    try:
        return lowered.compile(compiler_options=WITHOUT_TILES), (WITHOUT_TILES_NOTE,)
    except jax.errors.JaxRuntimeError as error:
        raise not_compiled(error) from error


def why_not(workload: Workload) -> str | None:
    """`None` where the step can be compiled for its target, else what is missing, in words."""
    if not workload.jit:
        return "A step that runs op by op is not one program, so there is nothing to compile."
    try:
        _device(workload, None)
    except BackendError as error:
        return str(error)
    return None


def _device(workload: Workload, memory: int | None) -> Any:
    target = workload.target
    if not target.gpu:
        return jax.devices("cpu")[0]
    capability = ".".join(map(str, target.capability))
    first = jax.devices()[0]
    if first.platform == "gpu" and str(getattr(first, "compute_capability", "")) == capability:
        return first
    return compile_only_gpu(target, memory)
