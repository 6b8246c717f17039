"""A GPU that can only be compiled for, since it need not be there, and what XLA plans for it.

JAX's CUDA plugin hands out such devices, and does so beside a CPU backend that is in use already, so this needs no
process of its own. The optional packages hold the compiler; cuDNN and cuBLAS are not needed.
"""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import jax
from jax.experimental import topologies

from oomproof._compat.patches import Patch
from oomproof._records.trace import Compiled, Target
from oomproof._simulators.xla.targets import target_config
from oomproof.errors import BackendError

# JAX refuses the plugin by itself where there is no cuDNN to run with.
_UNCHECKED = Patch(os.environ, "JAX_SKIP_CUDA_CONSTRAINTS_CHECK", lambda _: "1", create=True)
INSTALL = "pip install 'oomproof[gpu-compile]'"
# Tile sizes of XLA's own matrix kernels are the autotuner's to find, and those it starts from may not fit.
WITHOUT_TILES = {"xla_gpu_enable_triton_gemm": False}
WITHOUT_TILES_NOTE = "Matrix products are compiled as calls of cuBLAS."


def compile_only_gpu(target: Target, memory: int | None = None) -> Any:
    """A device to compile for.

    Args:
        target: Its architecture.
        memory: Its bytes; those of a well-known card of that architecture when not given.

    Raises:
        BackendError: When the packages to compile for it are missing, or the architecture is unknown.
    """
    config = target_config(target.capability, memory)
    try:
        topology = _topology(config)
    except Exception as error:
        # What is raised depends on what is missing: the plugin, its compiler, or a version that fits.
        raise BackendError(
            "Compiling for a GPU that is not in this machine needs JAX's CUDA compiler, which is not installed or does "
            f"not fit JAX {jax.__version__}. Install it with `{INSTALL}` (about 1 GB), or estimate without compiling."
        ) from error
    return topology.devices[0]


def _topology(config: str) -> Any:
    def described() -> Any:
        return topologies.get_topology_desc(platform="cuda", target_config=config, topology="1x1x1")

    with _UNCHECKED:
        try:
            return described()
        except NotImplementedError:
            # It has looked for plugins already, and refused this one.
            names = [f"jax_plugins.xla_cuda{version}" for version in (13, 12)]
            importlib.import_module(next(name for name in names if importlib.util.find_spec(name))).initialize()
            return described()


def not_compiled(error: Exception) -> BackendError:
    return BackendError(
        "XLA cannot compile this step for a GPU that is not in this machine. Estimate without compiling. It said: "
        + str(error).partition("\n")[0]
    )


def account(analysis: Any, tuned: bool, seconds: float, notes: tuple[str, ...]) -> Compiled:
    """XLA's own figures of a program."""
    return Compiled(
        arguments=int(analysis.argument_size_in_bytes),
        outputs=int(analysis.output_size_in_bytes),
        aliased=int(analysis.alias_size_in_bytes),
        temporary=int(analysis.temp_size_in_bytes),
        tuned=tuned,
        seconds=seconds,
        notes=notes,
    )
