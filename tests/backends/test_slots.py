"""A model that fits and an optimizer that does not: our error with numbers, never a bare one of the framework."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import pytest
from here import only

CHILD = pathlib.Path(__file__).with_name("slots_child.py")


@only("tensorflow", because="peaks of a real allocator on a CPU")
@pytest.mark.parametrize("how", [("built", "evaluate_first"), ("built", "on_batch"), ("unbuilt", "fit")])
def test_slots_that_do_not_fit_are_told_with_numbers(how):
    command = [sys.executable, str(CHILD), *how]
    child = subprocess.run(command, env=dict(os.environ), capture_output=True, text=True, timeout=300, check=True)
    answer = json.loads(child.stdout.strip().splitlines()[-1])
    assert answer["error"] == "CannotFitError"
    assert "Resident so far: weights 48.0 MiB, optimizer" in answer["text"]
    assert "100 MiB" in answer["text"]
