"""XLA asked in a process of its own: `python -m oomproof._simulators.xla.compile_process`.

TensorFlow and the compiler for GPUs are each over half a gigabyte, most of it never given back. A process that has
never heard of TensorFlow compiles within what TensorFlow alone takes, and what it took is gone when it ends.

It is given a line of JSON that says what to compile for, and a program in StableHLO, or none just to see whether it
could; it answers with a line of JSON.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import json
import os
import subprocess
import sys
import time
from typing import Any

from oomproof._records.trace import Compiled, Target
from oomproof.errors import BackendError

NEEDED = "compiling needs JAX and its CUDA compiler: pip install 'oomproof[gpu-compile]'"


def compiled_in_process(text: str, target: Target, memory: int | None) -> Compiled:
    """What XLA plans for a program on a GPU that need not be there.

    Args:
        text: The program, as StableHLO.
        target: The GPU.
        memory: Its bytes; those of a well-known card of that architecture when not given.

    Raises:
        BackendError: When the packages that compile are missing, or XLA fails at it.
    """
    found = _asked(target, memory, text)
    return Compiled(**found | {"notes": tuple(found["notes"])})


@functools.cache
def why_not_in_process(target: Target) -> str | None:
    """`None` where programs can be compiled for such a GPU, else what is missing, in words."""
    if importlib.util.find_spec("jax") is None:
        return NEEDED
    try:
        _asked(target, None, "")
    except BackendError as error:
        return str(error)
    return None


def _asked(target: Target, memory: int | None, text: str) -> dict[str, Any]:
    question = json.dumps({"capability": target.capability, "memory": memory})
    # It finds the packages this process finds, and leaves a GPU that is there alone.
    variables = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "JAX_PLATFORMS": "cpu"}
    # Not the folder it is started in: a file there may have the name of a package.
    command = [sys.executable, "-P", "-X", "utf8", "-m", __name__]
    done = subprocess.run(
        command, input=f"{question}\n{text}", env=variables, capture_output=True, encoding="utf-8", check=False
    )
    lines = done.stdout.splitlines()
    if done.returncode or not lines:
        said = done.stderr.strip().splitlines()
        raise BackendError(
            f"The process that compiles ended with status {done.returncode}. Estimate without compiling. It said: "
            + (said[-1] if said else "nothing")
        )
    answer: dict[str, Any] = json.loads(lines[-1])
    if "error" in answer:
        raise BackendError(answer["error"])
    return answer


def _answer(capability: list[int], memory: int | None, text: str) -> dict[str, Any]:
    from oomproof._compat.xla import compiler, ir, mlir
    from oomproof._simulators.xla.compile_only_gpu import (
        WITHOUT_TILES,
        WITHOUT_TILES_NOTE,
        account,
        compile_only_gpu,
        not_compiled,
    )

    start = time.perf_counter()
    device = compile_only_gpu(Target(True, (capability[0], capability[1])), memory)
    if not text:
        return {}
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
    stats = program.get_compiled_memory_stats()
    return dataclasses.asdict(account(stats, False, time.perf_counter() - start, notes))


def main() -> None:
    question = json.loads(sys.stdin.readline())
    try:
        answer = _answer(question["capability"], question["memory"], sys.stdin.read())
    except BackendError as error:
        answer = {"error": str(error)}
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
