"""`oomproof max-batch-size`"""

from __future__ import annotations

from typing import Any

import typer

from oomproof._cli import common


def max_batch_size(
    model: common.Source,
    gpu: common.GpuName = None,
    memory: common.Memory = None,
    engine: common.EngineName = "auto",
    phase: common.PhaseName = "train",
    precision: common.Precision = None,
    jit: common.Jit = None,
    input_shape: common.Shapes = None,
    classes: common.Classes = None,
    optimizer: common.Optimizer = None,
    backend: common.BackendName = None,
) -> None:
    """Print the largest batch size that fits on a card.

    Exit code: 3 if not even one sample fits, 2 for bad input.
    """
    options: dict[str, Any] = {"gpu": gpu, "memory": memory, "engine": engine, "phase": phase, "jit": jit}
    options["precision"] = precision
    loaded, shape, _ = common.load_model(model, backend, input_shape, classes, optimizer, precision)

    import oomproof

    typer.echo(oomproof.max_batch_size(loaded, input_shape=shape, **options))
