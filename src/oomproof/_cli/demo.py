"""`oomproof demo`"""

from __future__ import annotations

import pathlib
from typing import Annotated

import typer

from oomproof._records.units import parse_budget

_MIB = 2**20


def _bytes(text: str) -> int:
    try:
        size = parse_budget(text, device_bytes=None)
    except ValueError:
        size = None
    if size is None or size < _MIB:
        raise typer.BadParameter(f'expected a size of at least 1MiB, such as "200MiB" or "0.5GB". Received: {text!r}')
    return size


def demo(
    limit: Annotated[
        int, typer.Option(parser=_bytes, metavar="SIZE", help="Memory that TensorFlow may use in a limited process.")
    ] = "200MiB",  # type: ignore[assignment]  # typer hands defaults to the parser too
    batch_size: Annotated[int, typer.Option(min=1, help="Clips in a batch.")] = 256,
    json: Annotated[
        pathlib.Path | None, typer.Option(metavar="PATH", help="Also write all measurements to this file.")
    ] = None,
) -> None:
    """Run out of memory on purpose, with and without oomproof.

    Trains a small model with plain fit, the catch-and-halve loop and oomproof, side by side, with TensorFlow's real
    allocator under a hard limit. Needs no GPU and takes about a minute.
    """
    from rich.console import Console

    from oomproof._demo.run import run

    if json is not None and not json.absolute().parent.is_dir():
        raise typer.BadParameter(f"there is no folder {json.absolute().parent}", param_hint="--json")
    if not run(limit, batch_size, json, Console()):
        raise typer.Exit(1)
