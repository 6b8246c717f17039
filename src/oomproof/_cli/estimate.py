"""`oomproof estimate`"""

from __future__ import annotations

import dataclasses
import json as jsonlib
from typing import Annotated, Any

import typer

from oomproof._cli import common


def estimate(
    model: common.Source,
    batch_size: Annotated[str, typer.Option(metavar="N[,N…]", help="Samples in a batch. Several sizes are compared.")],
    gpu: common.GpuName = None,
    memory: common.Memory = None,
    engine: common.EngineName = "auto",
    phase: common.PhaseName = "train",
    precision: common.Precision = None,
    micro_batch_size: Annotated[int | None, typer.Option(min=1, help="Run each batch in pieces this large.")] = None,
    jit: common.Jit = None,
    input_shape: common.Shapes = None,
    classes: common.Classes = None,
    optimizer: common.Optimizer = None,
    backend: common.BackendName = None,
    json: common.Json = False,
) -> None:
    """Predict how much GPU memory training takes. Nothing is trained, and no GPU is needed.

    Exit code: 0 if it fits or no card is named, 3 if it may not fit, 2 for bad input.
    """
    sizes = [common.whole_number(text) for text in batch_size.split(",")]
    options: dict[str, Any] = {"gpu": gpu, "memory": memory, "engine": engine, "phase": phase, "jit": jit}
    options |= {"precision": precision, "micro_batch_size": micro_batch_size}
    loaded, shape, notes = common.load_model(model, backend, input_shape, classes, optimizer, precision)

    import oomproof

    found = [oomproof.estimate(loaded, size, input_shape=shape, **options) for size in sizes]
    found = [dataclasses.replace(each, notes=(*notes, *each.notes)) for each in found]
    if json and len(found) > 1:
        typer.echo(jsonlib.dumps([each.to_dict() for each in found], indent=2))
    else:
        typer.echo("\n\n".join(each.to_json() if json else str(each) for each in found))
    if any(each.fits is False for each in found):
        raise typer.Exit(3)
