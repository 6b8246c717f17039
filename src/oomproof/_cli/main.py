"""The command line: one verb per public function, and no traceback for what a user can put right."""

from __future__ import annotations

import dataclasses
import json as jsonlib
import os
import pathlib
import sys
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from oomproof._estimation import naming
from oomproof._machine import gpus as devices
from oomproof._records.units import format_bytes, parse_budget
from oomproof._version import __version__
from oomproof.errors import CannotFitError, OomproofError, RecoveryFailedError

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
    from oomproof._demo.run import run

    if json is not None and not json.absolute().parent.is_dir():
        raise typer.BadParameter(f"there is no folder {json.absolute().parent}", param_hint="--json")
    if not run(limit, batch_size, json, Console()):
        raise typer.Exit(1)


Source = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="model.keras, module:function that returns a model, or keras.applications.ResNet50",
        show_default=False,
    ),
]
GpuName = Annotated[str | None, typer.Option(help="A card: `oomproof gpus` lists them.")]
Memory = Annotated[str | None, typer.Option(metavar="SIZE", help="Memory of a card that is not listed, such as 24GiB.")]
EngineName = Annotated[str, typer.Option(help="trace, compile, probe (runs small steps here), or auto.")]
PhaseName = Annotated[str, typer.Option(help="train, test or predict.")]
Precision = Annotated[str | None, typer.Option(help="A dtype policy, such as mixed_bfloat16.")]
Jit = Annotated[bool | None, typer.Option("--jit/--no-jit", help="Compiled or not; default: as Keras decides.")]
Shapes = Annotated[
    list[str] | None,
    typer.Option(
        "--input-shape",
        metavar="SHAPE",
        help="Shape of a sample: 224,224,3 or 128:int32. For one of several inputs: name=128.",
    ),
]
Classes = Annotated[int | None, typer.Option(min=1, help="Classes, for keras.applications.")]
Optimizer = Annotated[str | None, typer.Option(help="For a model that is not compiled; default: adam.")]
BackendName = Annotated[str | None, typer.Option(help="tensorflow, jax or torch; default: as Keras is set up.")]


@app.command()
def estimate(
    model: Source,
    batch_size: Annotated[str, typer.Option(metavar="N[,N…]", help="Samples in a batch; several to compare them.")],
    gpu: GpuName = None,
    memory: Memory = None,
    engine: EngineName = "auto",
    phase: PhaseName = "train",
    precision: Precision = None,
    micro_batch_size: Annotated[int | None, typer.Option(min=1, help="Batches are run in pieces this large.")] = None,
    jit: Jit = None,
    input_shape: Shapes = None,
    classes: Classes = None,
    optimizer: Optimizer = None,
    backend: BackendName = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say how much GPU memory training will take, before it runs. The GPU need not be there.

    Exit code: 0 if it fits or no card is named, 3 if it does not fit or may not, 2 for bad input.
    """
    sizes = [_whole_number(text) for text in batch_size.split(",")]
    options: dict[str, Any] = {"gpu": gpu, "memory": memory, "engine": engine, "phase": phase, "jit": jit}
    options |= {"precision": precision, "micro_batch_size": micro_batch_size}
    loaded, shape, notes = _loaded(model, backend, input_shape, classes, optimizer, precision)

    import oomproof

    found = [oomproof.estimate(loaded, size, input_shape=shape, **options) for size in sizes]
    found = [dataclasses.replace(each, notes=(*notes, *each.notes)) for each in found]
    if json:
        answers = [each.to_json() for each in found]
        typer.echo(jsonlib.dumps(answers[0] if len(answers) == 1 else answers, indent=2))
    else:
        typer.echo("\n\n".join(str(each) for each in found))
    if any(each.fits is False for each in found):
        raise typer.Exit(3)


@app.command()
def max_batch_size(
    model: Source,
    gpu: GpuName = None,
    memory: Memory = None,
    engine: EngineName = "auto",
    phase: PhaseName = "train",
    precision: Precision = None,
    jit: Jit = None,
    input_shape: Shapes = None,
    classes: Classes = None,
    optimizer: Optimizer = None,
    backend: BackendName = None,
) -> None:
    """Print the largest batch that fits on a card.

    Exit code: 3 if not even one sample fits, 2 for bad input.
    """
    options: dict[str, Any] = {"gpu": gpu, "memory": memory, "engine": engine, "phase": phase, "jit": jit}
    options["precision"] = precision
    loaded, shape, _ = _loaded(model, backend, input_shape, classes, optimizer, precision)

    import oomproof

    typer.echo(oomproof.max_batch_size(loaded, input_shape=shape, **options))


@app.command()
def plan(
    model: Source = "",
    batch_size: Annotated[str, typer.Option(metavar="N", help="Samples in a batch.")] = "",
    budget: Annotated[str | None, typer.Option(metavar="SIZE", help="Memory to stay below: 12GiB, or 90%.")] = None,
    gpu: GpuName = None,
    memory: Memory = None,
    allow: Annotated[
        str,
        typer.Option(
            metavar="LEVERS",
            help="default, exact, or some of microbatch, recompute, xla, mixed_precision, batch_statistics.",
        ),
    ] = "default",
    input_shape: Shapes = None,
    classes: Classes = None,
    optimizer: Optimizer = None,
    backend: BackendName = None,
    cache: Annotated[bool, typer.Option("--cache/--no-cache", help="Look up and remember plans on disk.")] = True,
    clear_cache: Annotated[bool, typer.Option("--clear-cache", help="Forget every plan and leave.")] = False,
    output: Annotated[pathlib.Path | None, typer.Option(metavar="PATH", help="Also write the plan as JSON.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say how a batch can be trained within a budget, and what each way costs. The GPU need not be there.

    Exit code: 3 if nothing that is allowed fits, 2 for bad input.
    """
    if clear_cache:
        from oomproof._planning import plan_cache

        typer.echo(f"{plan_cache.forget()} plans forgotten")
        return
    if not model or not batch_size:
        raise ValueError(
            "Expected a model and --batch-size. Example: oomproof plan model.keras --batch-size 1024 --gpu t4"
        )
    size = _whole_number(batch_size)
    loaded, shape, notes = _loaded(model, backend, input_shape, classes, optimizer, None)

    import oomproof

    levers = allow if allow in ("default", "exact") else {word.strip() for word in allow.split(",")}
    found = oomproof.plan(
        loaded, size, budget=budget, gpu=gpu, memory=memory, allow=levers, input_shape=shape, cache=cache
    )
    if output is not None:
        found.save(output)
    typer.echo(jsonlib.dumps(found.to_json(), indent=2) if json else "\n".join([str(found), *notes]))


@app.command()
def gpus() -> None:
    """List the cards that can be named, and what each framework can use of them."""
    table = Table(box=None, pad_edge=False)
    for title in ("card", "memory", "TensorFlow", "JAX", "torch", "compute capability"):
        table.add_column(title, justify="left" if title == "card" else "right")
    here = devices.local()
    for gpu in ([here] if here else []) + list(devices.CATALOGUE.values()):
        usable = [format_bytes(gpu.usable(name)) for name in ("tensorflow", "jax", "torch")]
        name = f"{gpu.name} (in this machine)" if gpu is here else gpu.name
        table.add_row(name, format_bytes(gpu.memory), *usable, ".".join(map(str, gpu.capability)))
    Console().print(table)


@app.command()
def explain(
    file: Annotated[str, typer.Argument(metavar="FILE", help="A log; - for standard input.", show_default=False)],
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say why training failed: was it memory, which, how much was asked for and by what, and what to do.

    A script that is not guarded: python train.py 2>&1 | oomproof explain -

    Exit code: 0 if it was memory, 4 if it was not, 2 for a file that cannot be read.
    """
    import oomproof

    if file == "-":
        found = oomproof.explain(sys.stdin.buffer)
    elif not pathlib.Path(file).exists() or pathlib.Path(file).is_dir():
        raise ValueError(f"Expected a log to read, or - for standard input. There is no file {file!r}.")
    else:
        found = oomproof.explain(pathlib.Path(file))
    # Not through rich: a log is not to be read as markup.
    typer.echo(jsonlib.dumps(found.to_json(), indent=2) if json else str(found))
    if not found.is_memory:
        raise typer.Exit(4)


@app.command()
def doctor(json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """Look at this machine before training does: devices, who holds them, settings, versions, memory and its limits.

    Exit code: 3 if there is a problem, 0 otherwise.
    """
    from oomproof._doctor.checks import check

    found = check()
    typer.echo(jsonlib.dumps(found.to_json(), indent=2) if json else str(found))
    if found.worst == "problem":
        raise typer.Exit(3)


data_app = typer.Typer(help="Look at data pipelines.", no_args_is_help=True)
app.add_typer(data_app, name="data")


# One verb now; without this typer would take the word "audit" for its argument.
@data_app.callback()
def _data_options() -> None:
    pass


@data_app.command("audit")
def data_audit(
    source: Annotated[
        str,
        typer.Argument(
            metavar="MODULE:FUNCTION",
            help="A function that returns a tf.data.Dataset, a PyDataset, a DataLoader, arrays or a generator.",
            show_default=False,
        ),
    ],
    batch_size: Annotated[
        str, typer.Option(metavar="N", help="Samples in a batch, where the data is not batched.")
    ] = "",
    backend: BackendName = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say what a data pipeline will hold in memory, stage by stage, before it runs.

    Exit code: 3 if it will hold more than is free, 2 for bad input, 0 otherwise.
    """
    size = _whole_number(batch_size) if batch_size else None
    if ":" not in source:
        raise ValueError(f"Expected a function as module:function, such as train:make_dataset. Received: {source!r}")
    _prepare(backend)
    from oomproof.data.auditing import audit

    # As a function, since what it has just made may be taken from.
    found = audit(lambda: naming.called(source), batch_size=size)
    typer.echo(jsonlib.dumps(found.to_json(), indent=2) if json else str(found))
    if found.available is not None and found.host_bytes > found.available:
        raise typer.Exit(3)


def _whole_number(text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise ValueError(f"Expected batch sizes of at least 1, such as 64 or 64,128,256. Received: {text!r}")
    return number


def _loaded(
    source: str,
    backend: str | None,
    shapes: list[str] | None,
    classes: int | None,
    optimizer: str | None,
    precision: str | None,
) -> tuple[Any, Any, tuple[str, ...]]:
    """The model, the shapes that were given, and what had to be assumed."""
    _prepare(backend)
    shape = _shapes(shapes or [])
    from oomproof._estimation.sources import load

    plain = shape if isinstance(shape, tuple) else None
    model, notes = load(source, input_shape=plain, classes=classes, optimizer=optimizer, precision=precision)
    return model, shape, notes


def _prepare(backend: str | None) -> None:
    """Before Keras is imported."""
    if backend is not None:
        if backend not in ("tensorflow", "jax", "torch"):
            raise ValueError(f"Expected a backend: tensorflow, jax or torch. Received: {backend!r}")
        os.environ["KERAS_BACKEND"] = backend
    # What TensorFlow logs about the machine is not what was asked for.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    if devices.local() is None:
        # JAX would look for a GPU and say that there is none.
        os.environ.setdefault("JAX_PLATFORMS", "cpu")


def _shapes(texts: list[str]) -> Any:
    """`["224,224,3"]` → `(224, 224, 3)`; `["tokens=128:int32"]` → `{"tokens": (128, "int32")}`."""
    found = [_shape(text) for text in texts]
    if not found:
        return None
    if all(name for name, _ in found):
        return dict(found)
    if any(name for name, _ in found):
        raise ValueError("Expected a name for every --input-shape or for none.")
    return found[0][1] if len(found) == 1 else [shape for _, shape in found]


def _shape(text: str) -> tuple[str, tuple[Any, ...]]:
    name, _, rest = text.rpartition("=")
    sizes, _, dtype = rest.partition(":")
    try:
        shape = tuple(int(size) for size in sizes.split(","))
    except ValueError:
        raise ValueError(f"Expected a shape such as 224,224,3 or 128:int32. Received: {text!r}") from None
    return name, (*shape, dtype) if dtype else shape


def main() -> None:
    """The `oomproof` command. Whatever a user can put right ends in one message: 2 for bad input, 3 for too little
    memory, 1 for the rest."""
    try:
        app()
    except (OomproofError, ValueError, TypeError, OSError) as error:
        # Ours comes last; JAX has one of its own about tracebacks.
        text = "\n".join([f"oomproof: {naming.said(error)}", *getattr(error, "__notes__", ())[-1:]])
        Console(stderr=True, soft_wrap=True).print(text, style="red", markup=False, highlight=False)
        code = 3 if isinstance(error, CannotFitError) else 1 if isinstance(error, RecoveryFailedError) else 2
        raise SystemExit(code) from None
