"""The demo from start to end: check, train, print."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import pathlib
import time

from rich.console import Console

from oomproof._demo import processes, report
from oomproof._demo.processes import Outcome
from oomproof._records.units import format_bytes
from oomproof.errors import BackendError, CannotFitError

_MIB = 2**20
_NEXT = """
What next:
  guard     oomproof.guard(model), then model.fit as always
  estimate  oomproof estimate keras.applications.VGG16 --batch-size 64 --gpu t4
  read on   README.md, docs/ and oomproof --help"""


def run(limit: int, batch_size: int, json_path: pathlib.Path | None, console: Console) -> bool:
    """Runs the comparison under `limit` bytes and prints it.

    Returns:
        Whether oomproof finished its training.

    Raises:
        BackendError: TensorFlow is not installed.
        CannotFitError: TensorFlow cannot start under the limit, or the run without a limit did not finish.
    """
    if importlib.util.find_spec("tensorflow") is None:
        raise BackendError("The demo trains on TensorFlow, which is not installed. pip install 'oomproof[tensorflow]'")
    limit_mib = limit // _MIB
    console.print("The loop that people copy from forums, as it runs here:\n")
    console.print(report.copied_loop())
    started = time.monotonic()
    console.print(f"Training four times side by side, three of them with {limit_mib} MiB. About a minute …")
    with console.status("training"):
        outcomes = processes.compare(limit_mib, batch_size)
    seconds = time.monotonic() - started
    _check(outcomes, limit_mib)
    console.print(report.table(outcomes))
    console.print(report.explanation(outcomes, batch_size))
    console.print(f"Measured just now, {seconds:.0f} s in all.")
    console.print(_NEXT, markup=False, highlight=False)
    if json_path is not None:
        record = {name: dataclasses.asdict(outcome) for name, outcome in outcomes.items()}
        data = {"limit": limit_mib * _MIB, "batch_size": batch_size, "seconds": seconds, "outcomes": record}
        json_path.write_text(json.dumps(data, indent=2) + "\n")
    return outcomes["oomproof"].finished


def _check(outcomes: dict[str, Outcome], limit_mib: int) -> None:
    reference = outcomes["unlimited"]
    if reference.result is None or not reference.finished:
        why = f"{reference.end} {reference.last_words}" if reference.result is None else reference.result["message"]
        raise CannotFitError(
            f"The run without a limit did not finish, so there is nothing to compare with: {why.strip(' .')}. "
            "Try again with a larger --batch-size (fewer steps) or on a machine that is less busy."
        )
    unable = next((outcome for outcome in outcomes.values() if not outcome.started), None)
    if unable is not None:
        raise CannotFitError(
            f"{limit_mib} MiB is too little for TensorFlow to build the model ({unable.end} {unable.last_words}). "
            f"The run without a limit peaked at {format_bytes(reference.result['peak'])}. Try --limit 200MiB."
        )
