"""Folders of images, decoded a batch at a time and no larger than they are needed."""

from __future__ import annotations

import io
import math
import os
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from oomproof.data.order import Indices
from oomproof.data.sources.image_index import Paths, indexed
from oomproof.data.sources.shared import aligned, cores, needed, one_of, whole_number
from oomproof.data.stream import Source, Stream

_MODES = {"rgb": ("RGB", 3), "grayscale": ("L", 1), "rgba": ("RGBA", 4)}


def from_files(
    path: str | os.PathLike[str],
    *,
    image_size: tuple[int, int],
    batch_size: int = 32,
    shuffle: bool = False,
    seed: int | None = None,
    labels: Literal["inferred"] | Sequence[int] | None = "inferred",
    label_mode: Literal["int", "binary", "categorical"] = "int",
    class_names: list[str] | None = None,
    color_mode: Literal["rgb", "rgba", "grayscale"] = "rgb",
    dtype: Literal["uint8", "float32"] = "uint8",
    crop_to_aspect_ratio: bool = False,
    on_corrupt: Literal["error", "skip"] = "error",
    validation_split: float | None = None,
    subset: Literal["training", "validation"] | None = None,
    drop_remainder: bool = False,
    workers: int | None = None,
    max_queue_size: int | None = None,
) -> Stream:
    """Streams the images of a folder: jpg, png, bmp, gif (first frame) and webp.

    JPEGs are decoded at a half, a quarter or an eighth of their size if that is still at least `image_size`, so that
    the full image never exists. Images are then resized with Pillow's antialiased bilinear filter. A shuffled epoch is
    a full shuffle, without a buffer of images.

    Args:
        path: The folder. With inferred labels, each folder in it is a class, sorted by name.
        image_size: (height, width) of the images in a batch.
        batch_size: Images in a batch; the last batch of an epoch may have fewer.
        shuffle: Whether to shuffle, in a new order each epoch.
        seed: Seed of the order and of the split; drawn at random by default.
        labels: `"inferred"`, a label for each file in the order of the paths, or `None` for batches without labels.
        label_mode: `"int"` (int32), `"binary"` (float32, shape (n, 1)) or `"categorical"` (float32, one-hot).
        class_names: The folders to use, in the order of their labels.
        color_mode: `"rgb"`, `"rgba"` or `"grayscale"`: 3, 4 or 1 channels.
        dtype: `"uint8"`, or `"float32"` for the values 0 to 255 that `keras.utils.image_dataset_from_directory`
            gives, at four times the memory. Models with an `Input`, and `Rescaling`, take both.
        crop_to_aspect_ratio: Whether to crop to the aspect ratio of `image_size`, around the center, instead of
            stretching.
        on_corrupt: `"error"` to stop at a file that is not an image, naming it. `"skip"` to go on: the next readable
            file takes its place, so batches stay full, and `stream.corrupt` lists its path and the reason.
        validation_split: Share of the files to keep for validation, drawn with `seed`.
        subset: The part to stream: `"training"` or `"validation"`.
        drop_remainder: Whether to drop a last batch with fewer images.
        workers: Number of decoding threads; defaults to one for each core, at most 8.
        max_queue_size: Most batches to read ahead. Defaults to at most 10 and about 256 MiB.

    Returns:
        A `Stream`. `stream.source.class_names` are the classes.

    Example:

    ```python
    stream = oomproof.data.from_files("images/train", image_size=(256, 256), batch_size=64, shuffle=True)
    model.fit(stream, epochs=10)
    ```
    """
    batch_size = whole_number(batch_size, "batch_size", least=1)
    if isinstance(image_size, (str, int)) or len(image_size) != 2:
        raise ValueError(f"Expected `image_size` to be (height, width). Received: image_size={image_size!r}")
    size = tuple(whole_number(side, "image_size", least=1) for side in image_size)
    one_of(label_mode, "label_mode", "int", "binary", "categorical")
    one_of(color_mode, "color_mode", *_MODES)
    one_of(dtype, "dtype", "uint8", "float32")
    one_of(on_corrupt, "on_corrupt", "error", "skip")
    needed("PIL", "images")
    inferred = isinstance(labels, str)
    if inferred:
        one_of(labels, "labels", "inferred")
    paths, classes, names = indexed(path, inferred, class_names)
    given = classes if inferred else _given_labels(labels, len(paths), path)
    if not inferred:
        names = [str(label) for label in range(int(given.max()) + 1)] if given is not None else []
    if label_mode == "binary" and given is not None and len(names) != 2:
        raise ValueError(f"Expected 2 classes for label_mode='binary'. Received: {len(names)} in {os.fspath(path)!r}")
    source = ImageSource(
        paths,
        None if given is None else _encoded(given, label_mode, len(names)),
        _split(len(paths), validation_split, subset, seed),
        size=size,
        color_mode=color_mode,
        dtype=dtype,
        crop=crop_to_aspect_ratio,
        skip=on_corrupt == "skip",
    )
    source.class_names = names
    return Stream(source, batch_size, shuffle, seed, drop_remainder, workers, max_queue_size)


class ImageSource(Source):
    """Image files by number. Those that were found to be unreadable are remembered and not tried again."""

    class_names: list[str]

    def __init__(
        self,
        paths: Paths,
        labels: Any,
        chosen: Indices | None,
        *,
        size: tuple[int, ...],
        color_mode: str,
        dtype: str,
        crop: bool,
        skip: bool,
    ) -> None:
        self._paths = paths
        self._labels = labels
        self._chosen = chosen
        self._height, self._width = size
        self._mode, self._channels = _MODES[color_mode]
        self._dtype = np.dtype(dtype)
        self._crop = crop
        self._skip = skip
        self._unreadable: dict[int, str] = {}
        self.count = len(paths) if chosen is None else len(chosen)
        self.sample_bytes = self._height * self._width * self._channels * self._dtype.itemsize
        self.workers = cores()

    def read(self, indices: Indices) -> Any:
        images = aligned((len(indices), self._height, self._width, self._channels), self._dtype)
        files = np.array([self._readable(int(index), images[place]) for place, index in enumerate(indices)], np.int64)
        return (images,) if self._labels is None else (images, self._labels[files])

    @property
    def corrupt(self) -> dict[str, str]:  # type: ignore[override]  # made when asked for
        """Paths of the files that are no images, each with the reason."""
        return {self._paths[file]: reason for file, reason in dict(self._unreadable).items()}

    def _readable(self, index: int, into: Any) -> int:
        """Decodes a sample, or the next one that can be, and says which file that was."""
        for step in range(self.count):
            place = (index + step) % self.count
            file = place if self._chosen is None else int(self._chosen[place])
            if file in self._unreadable:
                continue
            try:
                self._decode(self._paths[file], into)
                return file
            except MemoryError:
                raise
            except Exception as wrong:  # Decoders of broken files raise whatever they stumble over.
                reason = f"{type(wrong).__name__}: {wrong}"
                if not self._skip:
                    raise ValueError(
                        f"{self._paths[file]} is not a readable image ({reason}). Repair or remove it, or pass "
                        "on_corrupt='skip' to skip such files."
                    ) from wrong
                self._unreadable[file] = reason
        first = self._paths[next(iter(self._unreadable))]
        raise ValueError(f"None of {self.count:,} files is a readable image. The first one tried was {first}")

    def _decode(self, path: str, into: Any) -> None:
        from PIL import Image

        with open(path, "rb") as file:
            content = file.read()
        with Image.open(io.BytesIO(content)) as image:
            # All of it at once: Pillow hands Python's lock over for every piece that it reads and decodes.
            image.decodermaxblock = len(content)
            box = self._box(*image.size)
            # JPEG only: decoded at a half, a quarter or an eighth, not below what is asked for here.
            wide, high = box[2] - box[0], box[3] - box[1]
            shrunk = (self._width * image.width / wide, self._height * image.height / high)
            image.draft(self._mode, (math.ceil(shrunk[0]), math.ceil(shrunk[1])))
            pixels = image if image.mode == self._mode else image.convert(self._mode)
            pixels = pixels.resize((self._width, self._height), Image.Resampling.BILINEAR, box=self._box(*pixels.size))
        into[...] = np.asarray(pixels).reshape(into.shape)

    def _box(self, width: int, height: int) -> tuple[float, float, float, float]:
        """What of an image is shown: all of it, or the largest part in the middle with the right proportions."""
        if not self._crop:
            return 0, 0, width, height
        scale = min(width / self._width, height / self._height)
        wide, high = self._width * scale, self._height * scale
        left, top = (width - wide) / 2, (height - high) / 2
        return left, top, min(left + wide, width), min(top + high, height)

    def __str__(self) -> str:
        return f"{self.count:,} images of {len(self.class_names)} classes"


def _given_labels(labels: Any, files: int, path: Any) -> Any:
    if labels is None:
        return None
    given = np.asarray(labels)
    if given.ndim != 1 or given.dtype.kind not in "iu":
        raise TypeError(f"Expected `labels` to be a list of ints. Received: {given.dtype} of shape {given.shape}")
    if len(given) != files:
        raise ValueError(
            f"Expected one label for each of {files:,} images in {os.fspath(path)!r}. Received: {len(given):,} labels"
        )
    if given.min() < 0:
        raise ValueError(f"Expected labels from 0. Received: {given.min()}")
    return given.astype(np.int32)


class _OneOf:
    """Labels as rows with a single 1, made for a batch at a time."""

    def __init__(self, labels: Any, classes: int) -> None:
        self._labels = labels
        self._classes = classes

    def __getitem__(self, files: Indices) -> Any:
        return (self._labels[files, None] == np.arange(self._classes)).astype(np.float32)


def _encoded(labels: Any, mode: str, classes: int) -> Any:
    if mode == "categorical":
        return _OneOf(labels, classes)
    return labels.astype(np.float32)[:, None] if mode == "binary" else labels


def _split(files: int, share: float | None, subset: str | None, seed: int | None) -> Indices | None:
    if share is None and subset is None:
        return None
    if share is None or subset is None or seed is None:
        raise ValueError(
            "Expected `validation_split`, `subset` and `seed` together, so that both parts split in the same place. "
            f"Received: validation_split={share}, subset={subset!r}, seed={seed}"
        )
    one_of(subset, "subset", "training", "validation")
    kept = int(files * share)
    if not 0 < share < 1 or not 0 < kept < files:
        raise ValueError(
            f"Expected `validation_split` between 0 and 1, with files on both sides. "
            f"Received: validation_split={share}, {kept:,} of {files:,} files"
        )
    mixed = np.random.default_rng(seed).permutation(files)
    return np.sort(mixed[:-kept] if subset == "training" else mixed[-kept:])
