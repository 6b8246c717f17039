"""How far the rules for workspaces on JAX are from what the autotuner chose for single layers. Runs anywhere.

    python benchmarks/estimate/workspaces.py

Reads benchmarks/estimate/truth/kernels-jax.jsonl, which the rules were made from, so these figures are no test of
them: they say how much of what was seen the rules can tell. A layer counts with the largest workspace among its
forward pass and its two gradients; under 16 MiB nothing is asked of it. Writes benchmarks/results/workspaces.json.
"""

from __future__ import annotations

import os
import pathlib
import re
import statistics
import sys
from typing import Any

os.environ["KERAS_BACKEND"] = "jax"

import kernels
from collect import TRUTH, read

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))
from _common import write_result

_WORKSPACE = re.compile(r"u8\[(\d+)\]")
SMALL = 16 << 20


def measured(layer: dict[str, Any]) -> int:
    return max((int(n) for call in layer["calls"] for n in _WORKSPACE.findall(call[1])[-1:]), default=0)


def expected(layer: dict[str, Any]) -> int:
    import jax

    from oomproof._simulators.jax.jaxpr import flattened

    function, arguments = kernels.pulled(layer)
    program = flattened(jax.make_jaxpr(function)(*arguments), gpu=True)
    return max((node.workspace for node in program.nodes), default=0)


def main() -> None:
    layers = [layer for layer in read(TRUTH / "kernels-jax.jsonl") if "calls" in layer]
    keys = ("kind", "dtype", "batch", "size", "inputs", "filters", "kernel", "strides", "dilation")
    rows = [
        {key: layer[key] for key in keys} | {"measured": measured(layer), "expected": expected(layer)}
        for layer in layers
    ]
    figures = {}
    for name, wanted in (("float32", ("float32",)), ("half", ("float16", "bfloat16"))):
        these = [row for row in rows if row["dtype"] in wanted]
        large = [row for row in these if row["measured"] > SMALL]
        figures[name] = {
            "layers": len(these),
            "large": len(large),
            "large_within_a_fifth": sum(abs(row["expected"] / row["measured"] - 1) <= 0.2 for row in large),
            "large_median_error": statistics.median(row["expected"] / row["measured"] - 1 for row in large),
            "small_said_to_be_large": sum(row["expected"] > SMALL >= row["measured"] for row in these),
        }
    write_result("workspaces", figures | {"small": SMALL, "rows": rows})


if __name__ == "__main__":
    main()
