"""TFRecord files, each record read by its place."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from oomproof.data.sources.shared import files_of, one_of, whole_number
from oomproof.data.stream import Stream
from oomproof.errors import BackendError


def from_records(
    path: str | os.PathLike[str] | Sequence[str],
    *,
    features: Mapping[str, Any] | None = None,
    label: str | None = None,
    parse: Callable[[bytes], Any] | None = None,
    batch_size: int = 32,
    shuffle: bool = False,
    seed: int | None = None,
    on_corrupt: Literal["error", "skip"] = "error",
    drop_remainder: bool = False,
    workers: int | None = None,
    max_queue_size: int | None = None,
) -> Stream:
    """Streams TFRecord files: a file, a list of files, or a folder of .tfrecord and .tfrecords files.

    Reading needs TensorFlow, on every backend. The offsets of the records are found once, when the stream is made, and
    take 8 bytes each; a shuffled epoch is then a full shuffle, without a buffer of records. Compressed files are
    refused, because their records cannot be read by offset.

    Args:
        path: Files to read.
        features: The features of a record, as for `tf.io.parse_example`. Inputs are a dict of arrays, or one array if
            there is one feature besides the label.
        label: The feature that is the target.
        parse: Instead of `features`, a function from a record (bytes) to a sample, such as `(x, y)`.
        batch_size: Records in a batch; the last batch of an epoch may have fewer.
        shuffle: Whether to shuffle, in a new order each epoch.
        seed: Seed of the order; drawn at random by default.
        on_corrupt: `"error"` to stop at a damaged record, naming file and offset. `"skip"` to go on: the next readable
            record takes its place, and `stream.corrupt` lists it. Where damage hides the start of the next record, the
            rest of the file is skipped.
        drop_remainder: Whether to drop a last batch with fewer records.
        workers: Number of reading threads.
        max_queue_size: Most batches to read ahead. Defaults to at most 10 and about 256 MiB.

    Returns:
        A `Stream`.
    """
    batch_size = whole_number(batch_size, "batch_size", least=1)
    one_of(on_corrupt, "on_corrupt", "error", "skip")
    if (features is None) == (parse is None):
        raise ValueError(f"Expected one of `features` and `parse`. Received: features={features}, parse={parse}")
    if label is not None and (features is None or label not in features):
        raise ValueError(f"Expected `label` to be one of `features`. Received: label={label!r}")
    files = files_of(path, "a TFRecord file", lambda name: ".tfrecord" in name)
    if not files:
        raise ValueError(f"Expected TFRecord files. Received: none in {path!r}")
    try:
        from oomproof.data.sources.tf_reader import RecordSource

        source = RecordSource(files, features, label, parse, skip=on_corrupt == "skip")
    except ImportError as missing:
        raise BackendError(
            f"Reading TFRecord files needs TensorFlow, which cannot be imported ({missing}): "
            "pip install 'oomproof[tensorflow]'"
        ) from missing
    return Stream(source, batch_size, shuffle, seed, drop_remainder, workers, max_queue_size)
