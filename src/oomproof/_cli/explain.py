"""`oomproof explain`"""

from __future__ import annotations

import pathlib
import sys
from typing import Annotated

import typer

from oomproof._cli import common


def explain(
    file: Annotated[str, typer.Argument(metavar="FILE", help="A log, or - for standard input.", show_default=False)],
    json: common.Json = False,
) -> None:
    """Explain why training failed, from its log: whether memory ran out, which, what asked for it, and what to do.

    Works on any training script: python train.py 2>&1 | oomproof explain -

    Exit code: 0 if memory ran out, 4 if it did not, 2 for a file that cannot be read.
    """
    import oomproof

    if file == "-":
        found = oomproof.explain(sys.stdin.buffer)
    elif not pathlib.Path(file).exists() or pathlib.Path(file).is_dir():
        raise ValueError(f"Expected a log, or - for standard input. There is no file {file!r}.")
    else:
        found = oomproof.explain(pathlib.Path(file))
    common.show(found, json)
    if not found.is_memory:
        raise typer.Exit(4)
