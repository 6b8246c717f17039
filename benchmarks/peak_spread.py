"""How much do the peaks of equal steps differ on TensorFlow's CPU allocator? Random models (`_grammar.py`).

    python benchmarks/peak_spread.py --seed 1 --count 12

Each model trains on one batch again and again, whole and in quarters, on an allocator that is never full. What is told
is the largest peak over the smallest, over the median and over the first: a plan for a budget is made from the first.
That is where `CPU_BUDGET_HEADROOM` in `piece_sizes.py` comes from. Takes about 20 s a model.
"""

from __future__ import annotations

import argparse
import os

os.environ |= {"KERAS_BACKEND": "tensorflow", "TF_CPP_MIN_LOG_LEVEL": "3", "TF_ENABLE_ONEDNN_OPTS": "0"}
os.environ |= {"TF_CPU_ALLOCATOR_USE_BFC": "true", "TF_CPU_BFC_MEM_LIMIT_IN_MB": "8192"}

_WARM, _STEPS = 2, 12


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=12)
    options = parser.parse_args()
    for number in range(options.count):
        _measure(options.seed, number)


def _measure(seed: int, number: int) -> None:
    import keras
    import numpy as np

    import oomproof
    from _grammar import case
    from _plan_run import _batches
    from oomproof import _backends as backends

    keras.utils.set_random_seed(1)
    made, memory = case(seed, number, "cpu"), backends.current().memory()
    data = _batches(made)[0]
    for pieces in (1, 4):
        oomproof.guard(made.model, plan=oomproof.Plan(micro_batch_size=-(-made.batch // pieces)), verbose=0)
        peaks = []
        for _ in range(_WARM + _STEPS):
            memory.reset_peak()
            made.model.train_on_batch(*data)
            use = memory.usage()
            assert use is not None
            peaks.append(use.peak)
        peaks = peaks[_WARM:]
        by = {"least": min(peaks), "median": float(np.median(peaks)), "first": peaks[0]}
        spread = ", ".join(f"{max(peaks) / size:.3f} of the {name}" for name, size in by.items())
        print(f"{number:>3} {made.model.name:<28} {pieces} pieces {max(peaks) / 2**20:6.1f} MiB: {spread}", flush=True)


if __name__ == "__main__":
    main()
