"""How far off an engine's figure may be: shares of the expected peak, below and above it.

The confidence is the share of the runs of benchmarks/estimate whose peak, measured on a GPU, was not above `high`, both
halves: benchmarks/results/estimate-trace.json, estimate-compile-jax.json (compiled without a GPU) and, where it was all
of them and one more is taken for one that was not, estimate-probe-torch-cap-gpu.json (the step itself does not fit).
Where the step itself was run they are estimate-probe-torch-gpu.json and estimate-probe-tensorflow-graph-gpu.json. It is
`None` where there are too few of them, and what stands here is then a guess from the few figures that are known.
"""

from __future__ import annotations

from typing import NamedTuple


class Band(NamedTuple):
    below: float
    above: float
    confidence: float | None = None


_BANDS = {
    ("compile", "jax", "compiled"): Band(0.02, 0.03, 0.88),
    ("probe", "torch", "eager"): Band(0.07, 0.10, 0.92),
    ("compile", "tensorflow", "compiled"): Band(0.04, 0.06),
    ("trace", "jax", "compiled"): Band(0.08, 0.10, 0.62),
    ("trace", "tensorflow", "compiled"): Band(0.20, 0.25),
    ("trace", "tensorflow", "graph"): Band(0.12, 0.15, 0.92),
    ("trace", "torch", "eager"): Band(0.05, 0.10, 0.96),
}
_UNKNOWN = Band(0.2, 0.3)
# Steps differ a little from one another.
_MEASURED = Band(0.02, 0.02, 0.96)


def band_of(engine: str, backend: str, mode: str, measured: bool = False) -> Band:
    return _MEASURED if measured else _BANDS.get((engine, backend, mode), _UNKNOWN)
