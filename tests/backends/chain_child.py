"""What real steps that recompute every block take from TensorFlow's allocator, as one JSON line: {model: figures}.

    python chain_child.py MODEL...

As `trace_child.py`, which does the measuring. TensorFlow orders what it optimises by hashes that differ from process to
process: in graphs with second computations that moves the peak by some activations. So it is the median of three.
"""

import json
import statistics
import sys

import chain_models
import trace_child
from trace_models import Kind


def recomputing(name):
    def build():
        from oomproof._backends import current

        model, batch = getattr(chain_models, name)()
        # Never left: the process ends with it.
        build.scope = current().recomputing(model, chain_models.blocks(name, model))
        build.scope.__enter__()
        (inputs,) = model.inputs
        return model, batch, (Kind(tuple(inputs.shape[1:]), 1000 if "int" in inputs.dtype else 0), Kind(below=10))

    return build


def main(*names):
    found = {}
    for name in names:
        trace_child.MODELS[name] = recomputing(name)
        runs = [trace_child.in_a_process(trace_child.measured, name) for _ in range(3)]
        found[name] = {figure: statistics.median(run[figure] for run in runs) for figure in runs[0]}
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
