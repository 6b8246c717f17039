"""`oomproof plan`"""

from __future__ import annotations

import pathlib
from typing import Annotated

import typer

from oomproof._cli import common


def plan(
    model: common.Source = "",
    batch_size: Annotated[str, typer.Option(metavar="N", help="Samples in a batch.")] = "",
    budget: Annotated[str | None, typer.Option(metavar="SIZE", help="Memory to stay within: 12GiB, or 90%.")] = None,
    gpu: common.GpuName = None,
    memory: common.Memory = None,
    allow: Annotated[
        str,
        typer.Option(
            metavar="LEVERS",
            help="default, exact, or some of microbatch, recompute, head, xla, mixed_precision, batch_statistics.",
        ),
    ] = "default",
    input_shape: common.Shapes = None,
    classes: common.Classes = None,
    optimizer: common.Optimizer = None,
    backend: common.BackendName = None,
    cache: Annotated[bool, typer.Option("--cache/--no-cache", help="Read and write plans on disk.")] = True,
    clear_cache: Annotated[bool, typer.Option("--clear-cache", help="Delete every plan on disk and exit.")] = False,
    output: Annotated[pathlib.Path | None, typer.Option(metavar="PATH", help="Also write the plan as JSON.")] = None,
    json: common.Json = False,
) -> None:
    """Show how to train a batch within a memory budget. Each way is listed with its cost; no GPU is needed.

    Exit code: 3 if nothing that is allowed fits, 2 for bad input.
    """
    if clear_cache:
        from oomproof._planning import plan_cache

        typer.echo(f"{plan_cache.forget()} plans deleted")
        return
    if not model or not batch_size:
        raise ValueError(
            "Expected a model and --batch-size. Example: oomproof plan model.keras --batch-size 1024 --gpu t4"
        )
    size = common.whole_number(batch_size)
    loaded, shape, notes = common.load_model(model, backend, input_shape, classes, optimizer)

    import oomproof

    levers = allow if allow in ("default", "exact") else {word.strip() for word in allow.split(",")}
    found = oomproof.plan(
        loaded, size, budget=budget, gpu=gpu, memory=memory, allow=levers, input_shape=shape, cache=cache
    )
    if output is not None:
        found.save(output)
    typer.echo(found.to_json() if json else "\n".join([str(found), *notes]))
