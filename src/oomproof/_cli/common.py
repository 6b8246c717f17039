"""What the verbs share: options, the model that is named, printing, and which errors become messages."""

from __future__ import annotations

import dis
import os
import types
from typing import TYPE_CHECKING, Annotated, Any

import typer

from oomproof._estimation import naming
from oomproof.errors import CannotFitError, OomproofError, RecoveryFailedError

if TYPE_CHECKING:
    from oomproof._records.record import Record

BACKENDS = ("tensorflow", "jax", "torch")
# How a note on an error begins that says what a step of the user's was given.
_TRIED = "A step of "

Source = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="model.keras, module:function that returns a model, or keras.applications.ResNet50",
        show_default=False,
    ),
]
GpuName = Annotated[str | None, typer.Option(help="A card that `oomproof gpus` lists.")]
Memory = Annotated[str | None, typer.Option(metavar="SIZE", help="Memory of a card that is not listed, such as 24GiB.")]
EngineName = Annotated[str, typer.Option(help="trace, compile, probe (runs small steps on this machine) or auto.")]
PhaseName = Annotated[str, typer.Option(help="train, test or predict.")]
Precision = Annotated[str | None, typer.Option(help="A dtype policy, such as mixed_bfloat16.")]
Jit = Annotated[bool | None, typer.Option("--jit/--no-jit", help="Compile the step or not. Default: as Keras decides.")]
Shapes = Annotated[
    list[str] | None,
    typer.Option(
        "--input-shape",
        metavar="SHAPE",
        help="Shape of a sample: 224,224,3 or 128:int32. For one of several inputs: name=128.",
    ),
]
Classes = Annotated[int | None, typer.Option(min=1, help="Number of classes, for keras.applications.")]
Optimizer = Annotated[str | None, typer.Option(help="For a model that is not compiled. Default: adam.")]
BackendName = Annotated[str | None, typer.Option(help="tensorflow, jax or torch. Default: as Keras is set up.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def show(record: Record, json: bool) -> None:
    """Prints a record as text or as JSON. Not through rich: a log or a name is not to be read as markup."""
    typer.echo(record.to_json() if json else str(record))


def whole_number(text: str) -> int:
    """A batch size."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise ValueError(f"Expected batch sizes of at least 1, such as 64 or 64,128,256. Received: {text!r}")
    return number


def prepare(backend: str | None) -> None:
    """Sets what Keras and its backend read when they are imported."""
    from oomproof._machine import gpus

    if backend is not None:
        if backend not in BACKENDS:
            raise ValueError(f"Expected a backend: tensorflow, jax or torch. Received: {backend!r}")
        os.environ["KERAS_BACKEND"] = backend
    # What TensorFlow logs about the machine is not what was asked for.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    if gpus.local() is None:
        # JAX would look for a GPU and say that there is none.
        os.environ.setdefault("JAX_PLATFORMS", "cpu")


def load_model(
    source: str,
    backend: str | None,
    shapes: list[str] | None,
    classes: int | None,
    optimizer: str | None,
    precision: str | None = None,
) -> tuple[Any, Any, tuple[str, ...]]:
    """The model, the shapes that were given, and what had to be assumed."""
    prepare(backend)
    shape = _shapes(shapes or [])
    from oomproof._estimation.sources import load

    plain = shape if isinstance(shape, tuple) else None
    model, notes = load(source, input_shape=plain, classes=classes, optimizer=optimizer, precision=precision)
    return model, shape, notes


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


# Errors


def message_of(error: Exception) -> str | None:
    """What to say of an error that the user can put right; `None` for any other, which keeps its traceback."""
    if isinstance(error, ModuleNotFoundError) and error.name in BACKENDS:
        return (
            f"Keras is set to {error.name}, which is not installed. pip install 'oomproof[{error.name}]', "
            "or name another backend with --backend."
        )
    if _raised_on_purpose(error) or (isinstance(error, OSError) and error.errno is not None):
        return naming.said(error)
    # A loss or a layer of the user's that fails comes with what it was given.
    tried = next((note for note in getattr(error, "__notes__", ()) if note.startswith(_TRIED)), None)
    return f"{naming.said(error)}\n{tried}" if tried and not _is_ours(_raised_at(error)[0]) else None


def exit_code(error: Exception) -> int:
    """3 for too little memory, 1 for a training that could not go on, 2 for everything else."""
    return 3 if isinstance(error, CannotFitError) else 1 if isinstance(error, RecoveryFailedError) else 2


def _raised_on_purpose(error: Exception) -> bool:
    """Whether it is one of ours, or says which argument our own code refuses."""
    if isinstance(error, OomproofError):
        return True
    frame, instruction = _raised_at(error)
    # A `raise` of ours is meant for the user; a call of ours that failed is a mistake in here.
    meant = frame is not None and frame.f_code.co_code[instruction] == dis.opmap["RAISE_VARARGS"]
    return isinstance(error, ValueError | TypeError | OSError) and meant and _is_ours(frame)


def _raised_at(error: Exception) -> tuple[types.FrameType | None, int]:
    """The frame that an error comes from, and the place of the instruction in it."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return (None, 0) if trace is None else (trace.tb_frame, trace.tb_lasti)


def _is_ours(frame: types.FrameType | None) -> bool:
    return frame is not None and str(frame.f_globals.get("__name__")).startswith("oomproof.")
