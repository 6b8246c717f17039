"""The demo's table, and the sentences under it. Every word and number comes from what the processes measured."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from rich.syntax import Syntax
from rich.table import Table
from rich.text import Text

from oomproof._demo import contestants
from oomproof._demo.processes import Outcome
from oomproof._records.units import format_bytes

_TITLES = {"unlimited": "no limit", "plain": "plain fit", "halving": "catch & halve", "oomproof": "oomproof"}


def copied_loop() -> Syntax:
    """The source of the loop that runs as `catch & halve`."""
    return Syntax(inspect.getsource(contestants.halving), "python", background_color="default")


def table(outcomes: dict[str, Outcome]) -> Table:
    grid = Table()
    grid.add_column("", style="bold")
    for name in outcomes:
        grid.add_column(_TITLES[name], justify="right")
    rows: dict[str, Callable[[Outcome], str]] = {
        "finished": _finished,
        "out of memory": _ooms,
        "batch size": _batch_size,
        "smallest piece": lambda outcome: str(_smallest_piece(outcome) or "–"),
        "clips seen (times)": _seen,
        "optimizer steps": _steps,
        "weights differ by": _apart,
        "peak memory": lambda outcome: format_bytes(_result(outcome)["peak"]),
        "time": lambda outcome: f"{_result(outcome)['seconds']:.0f} s",
    }
    for label, cell in rows.items():
        grid.add_row(label, *(cell(o) if o.result or cell is _finished else "–" for o in outcomes.values()))
    return grid


def explanation(outcomes: dict[str, Outcome], batch_size: int) -> Table:
    """What the table says, in words."""
    bullets = Table.grid(padding=(0, 1))
    for sentence in _sentences(outcomes, batch_size):
        bullets.add_row("•", Text(sentence))
    return bullets


def _sentences(outcomes: dict[str, Outcome], batch_size: int) -> list[str]:
    lines = [sentence for outcome in outcomes.values() if (sentence := _what_went_wrong(outcome))]
    if all(outcome.finished and out_of_memory(outcome) == 0 for outcome in outcomes.values()):
        lines.append("Everything fitted, so everyone did the same training. A smaller --limit makes it interesting.")
        return lines
    halving, ours = outcomes["halving"], outcomes["oomproof"]
    if halving.finished and out_of_memory(halving):
        lines.append(_about_halving(_result(halving), _result(outcomes["unlimited"])))
    if ours.finished:
        text = f"oomproof kept batches of {batch_size}"
        if out_of_memory(ours):
            text += f" and ran them in pieces of down to {_smallest_piece(ours)} where memory was short"
        text += f"; its weights are within {ours.apart:.1e} of the unlimited run"
        if ours.apart and halving.apart:
            text += f", {halving.apart / ours.apart:,.0f} times closer than the loop"
        lines.append(text + ".")
    return lines


def out_of_memory(outcome: Outcome) -> int:
    """Failed attempts: what the Run counted, or fits that were left by an error."""
    result = _result(outcome)
    if result["run"] is not None:
        return sum(event["kind"] in ("oom", "commit-oom") for event in result["run"]["events"])
    return len(result["fits"]) - bool(result["finished"])


def _result(outcome: Outcome) -> dict[str, Any]:
    assert outcome.result is not None
    return outcome.result


def _finished(outcome: Outcome) -> str:
    if outcome.finished:
        return "[green]yes[/]"
    return f"[red]no{', ' + outcome.end if outcome.end else ''}[/]"


def _ooms(outcome: Outcome) -> str:
    return str(out_of_memory(outcome))


def _batch_size(outcome: Outcome) -> str:
    sizes = " → ".join(str(fit["batch_size"]) for fit in _result(outcome)["fits"] if fit["batches"])
    return sizes or "–"


def _smallest_piece(outcome: Outcome) -> int | None:
    """The fewest samples of a full batch that went through memory at once."""
    result = _result(outcome)
    sizes = [fit["batch_size"] for fit in result["fits"] if fit["batches"]]
    if result["run"] is not None:
        sizes += [result["run"]["plan"]["micro_batch_size"], *(event["after"] for event in result["run"]["events"])]
    return min((size for size in sizes if size), default=None)


def _seen(outcome: Outcome) -> str:
    least, most = _result(outcome)["seen_least"], _result(outcome)["seen_most"]
    return str(least) if least == most else f"{least} to {most}"


def _steps(outcome: Outcome) -> str:
    counted, phantom = _result(outcome)["iterations"], _phantom_steps(_result(outcome))
    return f"{counted}, {phantom} not real" if phantom else str(counted)


def _phantom_steps(result: dict[str, Any]) -> int:
    """Steps that the optimizer counted though their batch was never finished."""
    return int(result["iterations"]) - sum(int(fit["batches"]) for fit in result["fits"])


def _apart(outcome: Outcome) -> str:
    if outcome.name == "unlimited":
        return "reference"
    return "–" if outcome.apart is None else f"{outcome.apart:.1e}"


def _about_halving(result: dict[str, Any], reference: dict[str, Any]) -> str:
    fits, phantom = result["fits"], _phantom_steps(result)
    text = f"The loop called fit {len(fits)} times and ended with batches of {fits[-1]['batch_size']}"
    if result["seen_most"] > reference["seen_most"]:
        text += f", saw some clips {result['seen_most']} times instead of {reference['seen_most']}"
    if phantom:
        text += f", and its optimizer counted {phantom} steps that never happened"
    return text + "."


def _what_went_wrong(outcome: Outcome) -> str:
    title = _TITLES[outcome.name]
    if outcome.result is None:
        return f"{title}: {outcome.end} {outcome.last_words}"
    if outcome.finished:
        return ""
    done = sum(fit["batches"] for fit in outcome.result["fits"])
    lines = [line.strip() for line in outcome.result["message"].splitlines() if line.strip()] or [""]
    telling = next((line for line in lines if "OOM" in line), lines[0]).split(" on /job:")[0]
    return f"{title} stopped after {done} batches: {outcome.result['error']}: {telling}"
