"""Does XLA fit a step into less memory when it is told of a limit? Keras's own steps on JAX, on a GPU.

    KERAS_BACKEND=jax python benchmarks/xla_limit.py

XLA recomputes by itself what a program has no room for. How much room it thinks there is comes from the memory JAX may
take (XLA_PYTHON_CLIENT_MEM_FRACTION) and from a compile option (xla_gpu_memory_limit_slop_factor). Each model is
compiled as it comes, and then with parts of the memory it took, given in the one way and in the other.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import subprocess
import sys
import time
from typing import Any

SHARES = (0.75, 0.5)
MODELS = ("encoder", "residual_batchnorm", "plain_cnn", "decoder")


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--models", default=",".join(MODELS))
    options.add_argument("--total-s", type=float, default=600)
    options.add_argument("--out", type=pathlib.Path, help="also append each answer to this file as it comes")
    options.add_argument("--child", help="internal")
    chosen = options.parse_args()
    if chosen.child:
        print(json.dumps(_compiled(**json.loads(chosen.child))))
        return
    from _common import environment, write_result

    if environment()["gpu"] is None:
        print("needs a GPU", file=sys.stderr)
        return
    end, rows = time.monotonic() + chosen.total_s, list[dict[str, Any]]()

    def ask(**wanted: Any) -> dict[str, Any]:
        row = wanted | (_child(wanted, end - time.monotonic()) if time.monotonic() < end else {"error": "no time left"})
        rows.append(row)
        print(row, flush=True)
        if chosen.out:
            with chosen.out.open("a") as file:
                file.write(json.dumps(row) + "\n")
        return row

    for model in chosen.models.split(","):
        plain = ask(model=model)
        for share in SHARES if "temporary" in plain else ():
            room = int(share * plain["temporary"])
            # What the option counts with: the limit less arguments and results, in percent.
            usable = plain["limit"] - plain["arguments"] - plain["results"]
            ask(model=model, share=share, slop=max(1, int(100 * room / usable)))
            ask(model=model, share=share, fraction=(room + plain["arguments"] + plain["results"]) / plain["card"])
    write_result("xla-limit-gpu", {"command": "python benchmarks/xla_limit.py", "rows": rows})


def _child(wanted: dict[str, Any], seconds: float) -> dict[str, Any]:
    command = [sys.executable, __file__, "--child", json.dumps(wanted)]
    fraction = str(wanted.get("fraction", 0.3))
    env = os.environ | {"KERAS_BACKEND": "jax", "XLA_PYTHON_CLIENT_MEM_FRACTION": fraction}
    env["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    try:
        ran = subprocess.run(command, env=env, capture_output=True, text=True, timeout=max(seconds, 1), check=False)
    except subprocess.TimeoutExpired:
        return {"error": "no time left"}
    if ran.returncode:
        return {"error": ran.stderr.strip()[-300:]}
    found: dict[str, Any] = json.loads(ran.stdout.strip().splitlines()[-1])
    return found


def _compiled(model: str, share: float = 1.0, slop: int | None = None, fraction: float | None = None) -> dict[str, Any]:
    import jax
    import jax.numpy as jnp

    import _plan_zoo
    from oomproof._records.trace import Spec, Target, Workload
    from oomproof._simulators.jax.keras_step import keras_step

    case = getattr(_plan_zoo, model)(large=True)
    inputs = [Spec((case.batch, *shape), kind) for shape, kind, _ in case.data]
    targets = case.targets or (((), "int32", case.classes),)
    labels = [Spec((case.batch, *shape), kind) for shape, kind, _ in targets]
    x, y = (specs[0] if len(specs) == 1 else specs for specs in (inputs, labels))
    work = Workload(x=x, y=y, phase="train", jit=True, target=Target(gpu=jax.default_backend() != "cpu"))
    with keras_step(case.model, work) as step:
        lowered = jax.jit(step.function).lower(step.state, step.data)
        began = time.perf_counter()
        program = lowered.compile({"xla_gpu_memory_limit_slop_factor": slop} if slop else None)
        seconds = time.perf_counter() - began
    analysis, device = program.memory_analysis(), jax.local_devices()[0]
    found: dict[str, Any] = {
        "temporary": int(analysis.temp_size_in_bytes),
        "arguments": int(analysis.argument_size_in_bytes),
        "results": int(analysis.output_size_in_bytes),
        "limit": int(device.memory_stats()["bytes_limit"]),
        "card": int(device.memory_stats()["bytes_limit"] / (fraction or 0.3)),
        "compile_seconds": round(seconds, 2),
    }
    try:
        state, data = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), (step.state, step.data))
        times = []
        for _ in range(6):
            began = time.perf_counter()
            jax.block_until_ready(program(state, data))
            times.append(time.perf_counter() - began)
        found["ms"] = round(1000 * min(times), 2)
    except jax.errors.JaxRuntimeError as error:
        found["ran_out"] = str(error)[:120]
    return found


if __name__ == "__main__":
    main()
