"""Scenarios in which memory really runs out (oom_child.py), each in a process of its own.

How memory is limited on each backend is in oom_memory.py. What they must agree with is computed by plain Keras, without
a limit, in another process.
"""

from __future__ import annotations

import concurrent.futures
import json
import pathlib
import tempfile

import numpy as np
import pytest
from here import BACKEND

# A failed request of TensorFlow's allocator waits ten seconds, idle. The others compute all the time.
AT_ONCE = 5 if BACKEND == "tensorflow" else 2

# name: (scenario, limit in MiB, options)
REFERENCES = {
    "reference": ("reference", 0, {"epochs": 2}),
    "reference of 4 epochs": ("reference", 0, {"epochs": 4}),
    "reference validation": ("validation", 0, {}),
    "reference predict": ("predict", 0, {}),
    "reference commit": ("commit", 0, {}),
}
SCENARIOS = {
    # A whole batch of the test model needs 27 MiB.
    "tensorflow": {
        "first step": ("first_step", 12, {}),
        "ballast seen": ("ballast_seen", 40, {"ballast": 26}),
        "ballast unseen": ("ballast_unseen", 40, {"ballast": 26}),
        "repeatedly": ("repeatedly", 40, {"epochs": 4, "between": [20, 30]}),
        "validation": ("validation", 16, {}),
        "predict": ("predict", 14, {}),
        "commit": ("commit", 52, {}),
        "commit fails": ("commit", 40, {}),
        "commit fails with nothing free": ("commit", 30, {}),
        "hopeless": ("hopeless", 60, {}),
        "transactional": ("transactional", 12, {}),
        "budget": ("budget", 100, {"budget": "12MB"}),
        "tight budget": ("budget", 100, {"budget": "5MB"}),
        "whole steps": ("steps", 100, {"steps": 2000}),
        "split steps": ("steps", 0, {"steps": 2000, "guard": {"micro_batch_size": 8}}),
    },
    # 42 MiB in one block, which may be there for a moment after the step that used it.
    "jax": {
        "first step": ("first_step", 20, {}),
        "ballast seen": ("ballast_seen", 100, {"ballast": 70}),
        "ballast unseen": ("ballast_unseen", 100, {"ballast": 70}),
        "repeatedly": ("repeatedly", 120, {"epochs": 4, "leave": [28, 12, 6, 3]}),
        "validation": ("validation", 24, {}),
        "predict": ("predict", 24, {}),
        "commit": ("commit", 60, {}),
        "commit fails": ("commit", 38, {}),
        "hopeless": ("hopeless", 60, {}),
        "transactional": ("transactional", 6, {}),
        "budget": ("budget", 100, {"budget": "12MB"}),
        "whole steps": ("steps", 0, {"steps": 2000}),
        "split steps": ("steps", 0, {"steps": 2000, "guard": {"micro_batch_size": 8}}),
    },
    # 15 MiB in many blocks.
    "torch": {
        "first step": ("first_step", 12, {}),
        "ballast seen": ("ballast_seen", 30, {"ballast": 20}),
        "ballast unseen": ("ballast_unseen", 30, {"ballast": 20}),
        "repeatedly": ("repeatedly", 40, {"epochs": 4, "leave": [12, 6, 2, 1]}),
        "validation": ("validation", 16, {}),
        "predict": ("predict", 8, {}),
        "commit": ("commit", 66, {}),
        "commit fails": ("commit", 56, {}),
        "hopeless": ("hopeless", 60, {}),
        "transactional": ("transactional", 12, {}),
        "whole steps": ("steps", 0, {"steps": 2000}),
        "split steps": ("steps", 0, {"steps": 2000, "guard": {"micro_batch_size": 8}}),
    },
}[BACKEND] | REFERENCES
# Left out of `make test`. Where memory cannot be measured, ballast that could be seen is not.
EXHAUSTIVE = {"tight budget", "commit fails with nothing free", "whole steps"}
if BACKEND != "tensorflow":
    EXHAUSTIVE |= {"ballast seen"}
# The longest first, so that none of them runs alone at the end.
LONG = ("repeatedly", "commit fails", "hopeless", "first step", "whole steps", "split steps")


def these(*names):
    """Those that this backend has."""
    marks = {name: [pytest.mark.exhaustive] if name in EXHAUSTIVE else [] for name in names}
    return [pytest.param(name, marks=marks[name]) for name in names if name in SCENARIOS]


def run_child(forks, scenario, limit, options, path, timeout=400):
    allocator = {"TF_CPU_ALLOCATOR_USE_BFC": "true", "TF_CPU_BFC_MEM_LIMIT_IN_MB": str(limit)} if limit else {}
    printed = forks.run("oom_child", scenario, limit, str(path), options, environment=allocator, timeout=timeout)
    answer = json.loads(printed.strip().splitlines()[-1])
    answer["weights"] = list(np.load(path).values()) if path.exists() else []
    return answer


class Answers:
    """What became of the scenarios. Each runs once, a few at a time."""

    def __init__(self, forks):
        self._forks, self._running = forks, {}
        self._pool = concurrent.futures.ThreadPoolExecutor(AT_ONCE)
        self._folder = tempfile.TemporaryDirectory()

    def begin(self, names):
        for name in sorted(names, key=lambda name: name not in LONG):
            if name not in self._running:
                path = pathlib.Path(self._folder.name, f"{name.replace(' ', '_')}.npz")
                self._running[name] = self._pool.submit(run_child, self._forks, *SCENARIOS[name], path)

    def __call__(self, name):
        self.begin([name])
        return self._running[name].result()

    def close(self):
        self._pool.shutdown(cancel_futures=True)
        self._folder.cleanup()
