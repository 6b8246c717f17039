"""The `oomproof` command: one verb per public function."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from oomproof._cli import common, data
from oomproof._cli.demo import demo
from oomproof._cli.doctor import doctor
from oomproof._cli.estimate import estimate
from oomproof._cli.explain import explain
from oomproof._cli.gpus import gpus
from oomproof._cli.max_batch_size import max_batch_size
from oomproof._cli.plan import plan
from oomproof._version import __version__

_TRACEBACK = "--traceback"

app = typer.Typer(
    name="oomproof",
    help="Train Keras models at the batch size you want, in the memory you have.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    # With rich, help would take five times as long to appear.
    rich_markup_mode=None,
)
for verb in (demo, estimate, max_batch_size, plan, gpus, explain, doctor):
    app.command()(verb)
app.add_typer(data.app, name="data")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"oomproof {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
    traceback: Annotated[bool, typer.Option(_TRACEBACK, help="Show the traceback of every error.")] = False,
) -> None:
    pass


def main() -> None:
    """Runs the command. What the user can put right ends in one message; any other error keeps its traceback."""
    # It counts behind a verb, too, where the verb would not know it.
    arguments = [word for word in sys.argv[1:] if word != _TRACEBACK]
    try:
        app(arguments)
    except Exception as error:
        message = common.message_of(error)
        if message is None or _TRACEBACK in sys.argv:
            raise
        from rich.console import Console

        text = f"oomproof: {message}"
        Console(stderr=True, soft_wrap=True).print(text, style="red", markup=False, highlight=False)
        raise SystemExit(common.exit_code(error)) from None
