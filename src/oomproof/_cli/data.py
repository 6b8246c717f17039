"""`oomproof data`, with one verb below it so far: `audit`"""

from __future__ import annotations

from typing import Annotated

import typer

from oomproof._cli import common
from oomproof._estimation import naming

app = typer.Typer(help="Check data pipelines.", no_args_is_help=True)


# Without this typer would take the word "audit" for the argument of the only verb.
@app.callback()
def _options() -> None:
    pass


@app.command()
def audit(
    source: Annotated[
        str,
        typer.Argument(
            metavar="MODULE:FUNCTION",
            help="A function that returns a tf.data.Dataset, a PyDataset, a DataLoader, arrays or a generator.",
            show_default=False,
        ),
    ],
    batch_size: Annotated[str, typer.Option(metavar="N", help="Samples in a batch, for data without batches.")] = "",
    backend: common.BackendName = None,
    json: common.Json = False,
) -> None:
    """Show how much memory a data pipeline holds, stage by stage.

    Exit code: 3 if it holds more than is free, 2 for bad input, 0 otherwise.
    """
    size = common.whole_number(batch_size) if batch_size else None
    if ":" not in source:
        raise ValueError(f"Expected a function as module:function, such as train:make_dataset. Received: {source!r}")
    common.prepare(backend)
    from oomproof.data.auditing import audit

    # As a function, since what it has just made may be taken from.
    found = audit(lambda: naming.called(source), batch_size=size)
    common.show(found, json)
    if found.available is not None and found.host_bytes > found.available:
        raise typer.Exit(3)
