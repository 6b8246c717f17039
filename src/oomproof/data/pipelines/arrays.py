"""`audit` of what Keras turns into batches itself: arrays given to `fit`, a PyDataset, a generator; and of DataLoaders.

What Keras holds for them differs by backend; it was read from Keras's data adapters and measured.
"""

from __future__ import annotations

import inspect
import os
import types
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from oomproof._machine import gpus, host
from oomproof._records.diagnosis import Finding
from oomproof._records.units import DTYPE_BYTES, format_bytes
from oomproof.data.audit_record import DataAudit, Stage

_WORTH_IT = 2**20
# Batches on the way, as they were counted with small models. JAX is handed a step before the last ones are done, and
# each keeps its batch; what a step leaves behind on torch waits for Python's garbage collector.
_JAX_BATCHES, _TORCH_BATCHES = 5, 7
# The same for generators: Keras looks at a batch first, and on TensorFlow prefetches as many as TensorFlow sees fit.
_MADE_BY_GENERATOR = {"tensorflow": 7, "jax": 9, "torch": 11}
# Copies of a cast at a time: Keras casts anew for every epoch, before the last copy is gone; on TensorFlow once.
_CASTS = {"tensorflow": 1, "torch": 2, "jax": 3}


def leaves(data: Any) -> Iterator[Any]:
    """What is in nested tuples, lists and dicts, without what is `None`."""
    if isinstance(data, Mapping):
        data = list(data.values())
    if isinstance(data, tuple | list):
        for each in data:
            yield from leaves(each)
    elif data is not None:
        yield data


def is_array(data: Any) -> bool:
    return hasattr(data, "shape") and hasattr(data, "dtype")


def nbytes(array: Any) -> int:
    """Bytes of an array or tensor of any framework."""
    if isinstance(array, np.ndarray):
        return int(array.nbytes)
    name = str(array.dtype).rpartition(".")[2]
    return int(np.prod([int(size) for size in array.shape], dtype=np.int64)) * DTYPE_BYTES.get(name, 8)


def audit_arrays(data: Any, batch_size: int | None) -> DataAudit:
    """Arrays as they are given to `fit`."""
    import keras

    arrays = list(leaves(data))
    counts = {int(array.shape[0]) if array.shape else 0 for array in arrays}
    if len(counts) != 1:
        raise ValueError(f"Expected arrays of the same length. Received: lengths {sorted(counts)}")
    (count,) = counts
    backend, floatx = keras.backend.backend(), keras.config.floatx()
    size = min(batch_size or 32, max(1, count))
    mine = sum(nbytes(array) for array in arrays if not isinstance(array, np.memmap))
    cast = sum(_cast_bytes(array, floatx) for array in arrays if _is_cast(array, floatx))
    whole = sum(_cast_bytes(array, floatx) for array in arrays)
    batch = whole * size // max(1, count)
    # The order of an epoch, as 64-bit numbers: one in use and, on TensorFlow, the next.
    order = count * 8 * (2 if backend == "tensorflow" else 1)
    stages = [
        Stage("arrays", mine, "yours", mine // max(1, count), count),
        Stage("cast", _CASTS[backend] * cast, _cast_note(_CASTS[backend], floatx) if cast else "not needed"),
    ]
    if backend == "tensorflow":
        on_the_way = len(os.sched_getaffinity(0)) + 2
        stages.append(Stage("fit: tensors", whole, "Keras makes one tensor of each array"))
        # Reading an array TensorFlow has it twice for a moment; batches take that room afterwards.
        reading = max(0, whole - order - on_the_way * batch)
        stages.append(Stage("fit: reading", reading, "a second copy while the tensor is made"))
    else:
        on_the_way = _JAX_BATCHES if backend == "jax" else _TORCH_BATCHES
    stages.append(Stage("fit: order", order, "indices of the samples of an epoch"))
    stages.append(Stage("fit: batches", on_the_way * batch, f"{on_the_way} of {format_bytes(batch)}", batch))
    placed = gpus.local() is not None
    on_device = {"tensorflow": whole + batch, "jax": 2 * batch, "torch": batch}[backend] if placed else 0
    return DataAudit(
        kind="arrays",
        stages=tuple(stages),
        host_bytes=sum(stage.bytes or 0 for stage in stages),
        device_bytes=on_device,
        available=host.available(),
        findings=tuple(_array_findings(arrays, backend, floatx, cast, whole, batch)),
    )


def _cast_note(copies: int, floatx: str) -> str:
    each = "in addition to the original" if copies == 1 else f"{copies} copies at a time: every epoch makes its own"
    return f"to {floatx}, {each}"


def _is_cast(array: Any, floatx: str) -> bool:
    name = str(array.dtype).rpartition(".")[2]
    return "float" in name and name != floatx


def _cast_bytes(array: Any, floatx: str) -> int:
    if not _is_cast(array, floatx):
        return nbytes(array)
    return int(np.prod([int(n) for n in array.shape], dtype=np.int64)) * DTYPE_BYTES[floatx]


def _array_findings(
    arrays: list[Any], backend: str, floatx: str, cast: int, whole: int, batch: int
) -> Iterator[Finding]:
    if cast >= _WORTH_IT:
        yield Finding(
            "warning",
            "float64 where smaller would do" if floatx == "float32" else "cast",
            f"Keras copies all of it to {floatx}: {format_bytes(cast)}.",
            f'x = x.astype("{floatx}")  # once, instead of the original',
        )
    if backend == "jax" and batch >= _WORTH_IT and gpus.local() is None:
        yield Finding(
            "note",
            "steps ahead of their results",
            f"With verbose=0 or 2 nothing waits for a step, and each holds {format_bytes(batch)} until it is done.",
            "verbose=1, or a callback that reads `logs` after each batch",
        )
    if backend == "tensorflow" and whole >= _WORTH_IT:
        yield Finding(
            "warning" if gpus.local() is not None else "note",
            "arrays copied to the device whole",
            f"On TensorFlow, `fit` copies each array to a tensor ({format_bytes(whole)}), on the GPU if there is one.",
            "oomproof.data.from_arrays(x, y, batch_size=…) feeds slices.",
        )
    for array in arrays:
        if str(array.dtype) == "int64" and nbytes(array) >= _WORTH_IT:
            yield Finding("note", "int64 where smaller would do", f"{format_bytes(nbytes(array))} of int64.",
                          'x = x.astype("int32")')  # fmt: skip
        if isinstance(array, np.memmap) and backend == "tensorflow":
            yield Finding("warning", "memory map read whole", "A memory map becomes one tensor: all of it is read.",
                          "oomproof.data.from_arrays(path, …)")  # fmt: skip


def audit_py_dataset(data: Any) -> DataAudit:
    """A `keras.utils.PyDataset`: what it holds itself, and the batches in its queue."""
    import keras

    batch = sum(nbytes(array) for array in leaves(data[0]) if is_array(array))
    held = _held_by(vars(data))
    workers, queued = int(data.workers), int(data.max_queue_size)
    threaded = workers > 1 or (workers > 0 and data.use_multiprocessing)
    stages = [Stage("dataset", held, "arrays in its attributes")]
    findings = []
    if threaded:
        if data.use_multiprocessing:
            stages.append(Stage("workers", workers * held, f"{workers} processes, each with a copy of the dataset"))
        # A batch that waits in the queue is finished; workers begin the next ones only when there is room in it.
        stages.append(Stage("queue", queued * batch, f"max_queue_size {queued} × {format_bytes(batch)}", batch))
    else:
        findings.append(
            Finding(
                "note",
                "no workers",
                "Batches are made one at a time, while the model waits.",
                "super().__init__(workers=2, max_queue_size=4)  # in your PyDataset",
            )
        )
    # Where a queue feeds the steps that are not done, theirs come out of it.
    alone = {"tensorflow": 2, "jax": _JAX_BATCHES, "torch": _TORCH_BATCHES}
    in_use = ({"tensorflow": 2, "jax": 1, "torch": 4} if threaded else alone)[keras.backend.backend()]
    stages.append(Stage("fit", in_use * batch, f"{in_use} of {format_bytes(batch)} in use", batch))
    if queued * batch > (host.available() or queued * batch):
        text = f"The queue holds up to {format_bytes(queued * batch)}."
        findings.append(Finding("problem", "queue larger than memory", text, "a smaller max_queue_size"))
    return _audit("PyDataset", stages, batch, findings)


def audit_data_loader(data: Any) -> DataAudit:
    """A torch DataLoader: what its dataset holds, the copies its workers have, and the batches on the way."""
    size = data.batch_size or getattr(data.batch_sampler, "batch_size", None) or 1
    known = True
    views = False
    try:
        parts = [array for array in leaves(data.dataset[0]) if is_array(array)]
        sample = sum(nbytes(array) for array in parts)
        views = all(_is_view(array) for array in parts)
    except (TypeError, NotImplementedError, IndexError, KeyError):
        # Iterable datasets have no items, and what is taken from one is gone.
        sample, known = 0, False
    batch, held = size * sample, _held_by(vars(data.dataset))
    workers, factor = data.num_workers, data.prefetch_factor or 0
    stages = [Stage("dataset", held, "arrays and tensors in its attributes")]
    findings = []
    if workers:
        copies = "shared until written to if forked; reading a Python list writes to it"
        stages.append(Stage("workers", 0, f"{workers} processes; {copies}"))
        ahead = workers * factor
        note = f"{workers} workers × prefetch_factor {factor} × {format_bytes(batch)}"
        stages.append(Stage("queue", ahead * batch if known else None, note, batch))
        if known and ahead * batch > (host.available() or ahead * batch):
            text = f"The workers hold up to {format_bytes(ahead * batch)} of batches."
            findings.append(Finding("problem", "queue larger than memory", text, "fewer workers, or prefetch_factor=1"))
    else:
        findings.append(
            Finding(
                "note",
                "no workers",
                "num_workers=0: batches are made while the model waits.",
                "DataLoader(…, num_workers=2, prefetch_factor=2)",
            )
        )
    import keras

    # The samples of a batch are there while it is put together, unless they are parts of what the dataset holds.
    put_together = 1 + int(data.pin_memory or not (workers or views))
    if keras.backend.backend() == "torch":
        put_together += 1 if workers else _TORCH_BATCHES - 3
    elif not workers:
        put_together += 1  # Whoever is not torch makes a copy of it.
    in_use = put_together * batch
    stages.append(Stage("batch", in_use if known else None, "the batch in use, and its samples", batch))
    return _audit("DataLoader", stages, batch, findings)


def _is_view(array: Any) -> bool:
    """Whether it is a part of a larger tensor of torch's."""
    return hasattr(array, "untyped_storage") and array.untyped_storage().nbytes() > nbytes(array)


def audit_generator(data: Any, fresh: bool) -> DataAudit:
    """A Python generator. Only from a `fresh` one, that nobody else has, an element may be taken."""
    frame = data.gi_frame
    held = 0 if frame is None else _held_by({**frame.f_locals, **_closure(data)})
    batch, first = None, next(data, None) if fresh else None
    if first is not None:
        batch = sum(nbytes(array) for array in leaves(first) if is_array(array))
        held = max(held, 0 if frame is None else _held_by({**frame.f_locals, **_closure(data)}) - batch)
    import keras

    backend = keras.backend.backend()
    # Parts of arrays that it holds are nobody's own until they are tensors.
    cut = first is not None and all(getattr(array, "base", None) is not None for array in leaves(first))
    count = {"tensorflow": 1, "jax": 6, "torch": 6}[backend] if cut else _MADE_BY_GENERATOR[backend]
    note = "unknown before it runs" if batch is None else f"{count} of {format_bytes(batch)}"
    stages = [
        Stage("generator", held, "arrays in its variables"),
        Stage("batches", None if batch is None else count * batch, note, batch),
    ]
    findings = []
    if held >= _WORTH_IT and held > 4 * (batch or 0):
        findings.append(
            Finding(
                "warning",
                "generator that holds everything",
                f"Its variables hold {format_bytes(held)}: the data is already in memory.",
                'np.load("x.npy", mmap_mode="r") in it, or oomproof.data.from_arrays("x.npy", …)',
            )
        )
    return _audit("generator", stages, batch or 0, findings)


def _closure(data: Any) -> dict[str, Any]:
    try:
        found = inspect.getgeneratorlocals(data)
    except TypeError:
        return {}
    return dict(found)


def _held_by(variables: Mapping[str, Any]) -> int:
    """Bytes of the arrays among these, each counted once; memory maps are not held."""
    found = {id(each): each for value in variables.values() for each in _arrays_in(value)}
    return sum(nbytes(each) for each in found.values() if not isinstance(each, np.memmap))


def _arrays_in(value: Any) -> Iterator[Any]:
    if isinstance(value, types.ModuleType | type):
        return
    if is_array(value):
        yield value
    elif isinstance(value, Mapping | tuple | list) and len(value) < 100_000:
        yield from (each for each in leaves(value) if is_array(each))


def _audit(kind: str, stages: list[Stage], batch: int, findings: list[Finding]) -> DataAudit:
    return DataAudit(
        kind=kind,
        stages=tuple(stages),
        host_bytes=sum(stage.bytes or 0 for stage in stages),
        device_bytes=batch if gpus.local() is not None else 0,
        available=host.available(),
        findings=tuple(findings),
    )
