"""How long a step takes in pieces, and on the host: figures that were measured, and guesses where none were."""

from __future__ import annotations

from oomproof._records.trace import Chain, Workload

# What each piece of a batch beyond the first adds to the time the device takes, as a share of it: medians over the rows
# of benchmarks/results/step-gpu-*pieces*.json, one GPU, two nets. TensorFlow compiled: one net in four pieces, no file.
# On torch it is the host that takes longer.
_PIECE_COST = {
    ("jax", "compiled"): 0.02,
    ("tensorflow", "compiled"): 0.05,
    ("tensorflow", "graph"): 0.03,
    ("torch", "eager"): 0.02,
}
_USUAL_PIECE_COST = 0.10
# Seconds the host takes for a layer, forward and back, where kernels are started one by one; how many layers could be
# computed again in the time that it takes to begin a run; and how fast cards are next to the one that costs are for, by
# compute capability. Fitted to 40 plans of four nets on one H200 (benchmarks/results/plan-times-gpu-torch-fit.json).
# The other cards are guesses.
_SECONDS_TO_START = 0.00046
_LAYERS_TO_BEGIN = 5.4
_SPEEDS = {(9, 0): 4.4, (8, 9): 1.9, (8, 6): 1.25, (8, 0): 2.5, (7, 5): 0.6}
# Guesses, on the slow side: on a conv net XLA took less than a quarter of the time of graph mode.
SPEED_OF_XLA = 0.4
SPEED_OF_MIXED_PRECISION = 0.6


def piece_cost(backend: str, mode: str) -> float:
    """Time that each piece beyond the first adds to a step, as a share of it."""
    return _PIECE_COST.get((backend, mode), _USUAL_PIECE_COST)


def host_share(chain: Chain, workload: Workload) -> float:
    """Time the host takes to start a step, as a multiple of the device's. CPUs are their own host."""
    if not workload.target.gpu or not chain.seconds:
        return 0.0
    capability = workload.target.capability
    speed = next((speed for known, speed in _SPEEDS.items() if capability >= known), 1.0)
    return _SECONDS_TO_START * chain.calls / (3 * chain.seconds / speed)


def run_cost(chain: Chain, host: float) -> float:
    """Time to begin a run of segments again, as a share of the forward pass."""
    # The more the device is waited for, the less it matters.
    return _LAYERS_TO_BEGIN / max(1, chain.calls) * host / (1 + host)
