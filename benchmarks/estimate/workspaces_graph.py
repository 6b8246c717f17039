"""How far traces of single layers on TensorFlow, in graph mode, are from what they took on a GPU. Runs anywhere.

    python benchmarks/estimate/workspaces_graph.py

Reads benchmarks/estimate/truth/kernels-tensorflow.jsonl, which the rules for convolutions were made from, so these
figures are no test of them: they say how much of what was seen the rules can tell. Each layer counts three times, with
its forward pass and its two gradients, each a function of its own as kernels.py ran it. What a function takes beside
its inputs is compared; under 1 MiB nothing is asked of it. Writes benchmarks/results/workspaces-graph.json.
"""

from __future__ import annotations

import os
import pathlib
import statistics
import sys
from typing import Any

os.environ |= {"KERAS_BACKEND": "tensorflow", "TF_CPP_MIN_LOG_LEVEL": "3"}

import kernels
from collect import TRUTH, read

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))
from _common import write_result

SMALL = 1 << 20
PARTS = ("forward", "input", "filter")


def expected(layer: dict[str, Any]) -> dict[str, int]:
    """Bytes that each part of a layer takes beside its inputs, by its trace for an H200."""
    import tensorflow as tf

    from oomproof._estimation.allocator import replay
    from oomproof._records.trace import Buffer, Op, Target, Trace
    from oomproof._simulators.tensorflow.executor import Executor
    from oomproof._simulators.tensorflow.graph import function_graph

    found = {}
    for part, (function, inputs) in kernels.functions(layer).items():
        traced = tf.function(function, jit_compile=False, autograph=False).get_concrete_function(*inputs).graph
        graph = function_graph(traced, [*traced.outputs, *traced.inputs], Target(True, (9, 0)))
        execution = Executor(graph, True).run()
        count = len(execution.ran)
        buffers = tuple(
            Buffer(block.size, block.start, count if block.end is None else block.end, "temporary", "")
            for block in execution.blocks
        )
        given = sum(kind.size for node in graph.nodes if node.op == "IteratorGetNext" for kind in node.outputs)
        ops = tuple(Op(node.name, "forward", "") for node in execution.ran)
        found[part] = replay(Trace("bfc", ops, buffers)).peak - given
    return found


def main() -> None:
    rows = []
    for layer in read(TRUTH / "kernels-tensorflow.jsonl"):
        if "bytes" in layer:
            said = expected(layer)
            rows += [
                {key: layer[key] for key in ("number", "kind", "dtype", "kernel")}
                | {"part": part, "measured": layer["bytes"][part], "expected": said[part]}
                for part in PARTS
            ]
    large = [row for row in rows if row["measured"] > SMALL]
    figures = {}
    for part in PARTS:
        errors = [row["expected"] / row["measured"] - 1 for row in large if row["part"] == part]
        figures[part] = {
            "large": len(errors),
            "within_a_tenth": sum(abs(error) <= 0.1 for error in errors),
            "median_error": statistics.median(errors),
            "median_absolute_error": statistics.median(map(abs, errors)),
        }
    write_result("workspaces-graph", figures | {"small": SMALL, "rows": rows})


if __name__ == "__main__":
    main()
