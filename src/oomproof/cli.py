"""The command line: one verb per public function, and no traceback for what a user can put right."""

from __future__ import annotations

import pathlib
from typing import Annotated

import typer
from rich.console import Console

from oomproof._version import __version__
from oomproof.errors import OomproofError
from oomproof.units import parse_budget

_MIB = 2**20

app = typer.Typer(
    name="oomproof",
    help="Train Keras models inside the memory that is there, with the batch size that was asked for.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"oomproof {__version__}")
        raise typer.Exit


def _bytes(text: str) -> int:
    try:
        size = parse_budget(text, device_bytes=None)
    except ValueError:
        size = None
    if size is None or size < _MIB:
        raise typer.BadParameter(f'expected a size of at least 1MiB, such as "200MiB" or "0.5GB". Received: {text!r}')
    return size


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and leave.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    pass


@app.command()
def demo(
    limit: Annotated[
        int, typer.Option(parser=_bytes, metavar="SIZE", help="Memory that TensorFlow may use in a limited process.")
    ] = "200MiB",  # type: ignore[assignment]  # typer hands defaults to the parser too
    batch_size: Annotated[int, typer.Option(min=1, help="Clips in a batch.")] = 256,
    json: Annotated[
        pathlib.Path | None, typer.Option(metavar="PATH", help="Also write everything measured to this file.")
    ] = None,
) -> None:
    """Run out of memory on purpose: plain fit, the catch-and-halve loop and oomproof, side by side.

    Trains a small model on TensorFlow's real allocator under a hard limit; no GPU needed. Takes about a minute.
    """
    from oomproof.demo.run import run

    if json is not None and not json.absolute().parent.is_dir():
        raise typer.BadParameter(f"there is no folder {json.absolute().parent}", param_hint="--json")
    if not run(limit, batch_size, json, Console()):
        raise typer.Exit(1)


def main() -> None:
    """The `oomproof` command. Whatever a user can put right ends in one message and exit code 1 (2 for usage)."""
    try:
        app()
    except (OomproofError, ValueError, OSError) as error:
        Console(stderr=True).print(f"oomproof: {error}", style="red", markup=False, highlight=False)
        raise SystemExit(1) from None
