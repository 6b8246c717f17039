"""A GPU that is not there, what XLA plans for it, and what it cannot plan without it.

JAX's CUDA plugin hands out devices that can only be compiled for, and does so beside a CPU backend that is in use
already, so this needs no process of its own. The optional packages hold the compiler; cuDNN and cuBLAS are not needed.
"""

from __future__ import annotations

import importlib.util
import math
import os
import re
from typing import Any
from unittest import mock

import jax
from jax.experimental import topologies

from oomproof.backends.xla.targets import target_config
from oomproof.errors import BackendError
from oomproof.tracing import Compiled, Target, Workspace

INSTALL = "pip install 'oomproof[gpu-compile]'"
# Tile sizes of XLA's own matrix kernels are the autotuner's to find, and those it starts from may not fit.
WITHOUT_TILES = {"xla_gpu_enable_triton_gemm": False}
WITHOUT_TILES_NOTE = "Matrix products are compiled as calls of cuBLAS."


def absent_gpu(target: Target, memory: int | None = None) -> Any:
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

    # JAX refuses the plugin by itself where there is no cuDNN to run with.
    with mock.patch.dict(os.environ, JAX_SKIP_CUDA_CONSTRAINTS_CHECK="1"):
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


def account(analysis: Any, text: str | None, seconds: float, notes: tuple[str, ...]) -> Compiled:
    """XLA's own figures, and a workspace for the convolutions of a program compiled without its GPU, given as text."""
    return Compiled(
        arguments=int(analysis.argument_size_in_bytes),
        outputs=int(analysis.output_size_in_bytes),
        aliased=int(analysis.alias_size_in_bytes),
        temporary=int(analysis.temp_size_in_bytes),
        workspace=Workspace(0, 0) if text is None else convolution_workspace(text),
        seconds=seconds,
        notes=notes,
    )


_CONVOLUTION = re.compile(r"= (\(.*?\)|\S+) custom-call\(.*__cudnn\$conv")
_SHAPE = re.compile(r"[a-z]+(\d+)\w*\[([\d,]*)\]")


def convolution_workspace(program: str) -> Workspace:
    """What the convolutions of a compiled program will take, when no autotuner has chosen their algorithms.

    cuDNN's algorithms want anything from nothing to several times the data they work on. On an H200, in float32, what a
    program compiled there took more than one compiled without it was, in units of the largest result of a convolution:
    0.9 and 1.0 for ResNet50 at batch 32 and 64, 0.6 for EfficientNetB0, and nothing for two nets of plain convolutions.
    So half of it is what to expect, and all of it the most, which is a guess and not a bound.
    """
    largest = max((_bytes(results) for results in _CONVOLUTION.findall(program)), default=0)
    return Workspace(expected=largest // 2, upper=largest)


def _bytes(shapes: str) -> int:
    """Of everything in the text of an HLO shape."""
    return sum(
        int(bits) // 8 * math.prod(int(n) for n in dimensions.split(",") if n)
        for bits, dimensions in _SHAPE.findall(shapes)
    )
