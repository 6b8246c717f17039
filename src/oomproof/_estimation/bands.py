"""How far off an engine's figure may be: shares of the expected peak, below and above it.

The confidence is the share of the runs of benchmarks/estimate whose peak, measured on a GPU, was not above `high`, both
halves. They are in benchmarks/results: estimate-trace.json, estimate-compile-jax.json and
estimate-compile-tensorflow-xla.json (compiled without a GPU), estimate-probe-torch-cap-gpu.json (the step itself does
not fit), estimate-compile-jax-gpu.json (compiled on the GPU), and, where the step itself was run,
estimate-probe-torch-gpu.json and estimate-probe-tensorflow-graph-gpu.json. Where it was all of them, one more is taken
for one that was not. It is `None` where there are too few, and what stands here is then a guess.
"""

from __future__ import annotations

from typing import NamedTuple


class Band(NamedTuple):
    below: float
    above: float
    confidence: float | None = None


_BANDS = {
    ("compile", "jax", "compiled"): Band(0.08, 0.10, 0.96),
    ("probe", "torch", "eager"): Band(0.07, 0.10, 0.92),
    ("compile", "tensorflow", "compiled"): Band(0.04, 0.06, 0.89),
    ("trace", "jax", "compiled"): Band(0.11, 0.10, 0.93),
    ("trace", "tensorflow", "compiled"): Band(0.10, 0.10, 0.89),
    ("trace", "tensorflow", "graph"): Band(0.08, 0.10, 0.96),
    ("trace", "torch", "eager"): Band(0.05, 0.10, 0.96),
}
_UNKNOWN = Band(0.2, 0.3)
# Steps differ a little from one another.
_MEASURED = Band(0.02, 0.02, 0.96)
# On the card the autotuner may choose other kernels the next time.
_TUNED = Band(0.05, 0.05, 0.9)


def band_of(engine: str, backend: str, mode: str, *, measured: bool = False, tuned: bool = False) -> Band:
    if measured or tuned:
        return _MEASURED if measured else _TUNED
    return _BANDS.get((engine, backend, mode), _UNKNOWN)
