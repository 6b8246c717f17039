"""The image files below a folder and their labels, held compactly: a million paths take some 50 MB, not 200."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import numpy as np

from oomproof.data.sources.shared import existing, progress

SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".png", ".webp")


class Paths:
    """Paths below a folder as one string of bytes."""

    def __init__(self, root: str, names: list[bytes]) -> None:
        self._root = os.fsencode(root)
        self._ends = np.cumsum([len(name) for name in names], dtype=np.int64)
        self._text = b"".join(names)

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, index: int) -> str:
        begin = int(self._ends[index - 1]) if index else 0
        return os.fsdecode(os.path.join(self._root, self._text[begin : int(self._ends[index])]))


def indexed(root: Any, with_classes: bool, class_names: list[str] | None) -> tuple[Paths, Any, list[str]]:
    """Finds the images below a folder.

    Args:
        root: The folder.
        with_classes: Whether each folder in it is a class.
        class_names: The classes, where not all folders are or their order is not that of their names.

    Returns:
        Paths in the order of their names, class by class; the number of each one's class; the classes.
    """
    root = existing(root, "a folder of images")
    if not os.path.isdir(root):
        raise NotADirectoryError(f"Expected a folder of images. Received: {root!r}, which is a file")
    folders = _folders(root, class_names) if with_classes else [""]
    names: list[bytes] = []
    counts: list[int] = []
    with progress(f"Looking for images in {root}") as tell:
        for folder in folders:
            before = len(names)
            for name in _below(os.path.join(root, folder), folder):
                names.append(os.fsencode(name))
                tell(len(names))
            counts.append(len(names) - before)
    if not names:
        where = f"{len(folders)} folders of {root}" if with_classes else root
        raise ValueError(f"Expected images ({', '.join(SUFFIXES)}). Received: none in {where}")
    return Paths(root, names), np.repeat(np.arange(len(folders), dtype=np.int32), counts), folders


def _folders(root: str, class_names: list[str] | None) -> list[str]:
    with os.scandir(root) as entries:
        found = sorted(entry.name for entry in entries if entry.is_dir() and not entry.name.startswith("."))
    if class_names is not None:
        if missing := [name for name in class_names if name not in found]:
            raise ValueError(
                f"Expected a folder for each of {len(class_names)} class names in {root}. "
                f"Received: class_names with {', '.join(map(repr, missing[:5]))}; there are "
                f"{', '.join(map(repr, found[:10]))}"
            )
        return list(class_names)
    if not found:
        raise ValueError(
            f"Expected a folder for each class in {root}. Received: no folders there. "
            "Pass labels=None, or a list of labels, for images without class folders."
        )
    return found


def _below(folder: str, name: str) -> Iterator[str]:
    """Images in a folder and in the folders below it."""
    with os.scandir(folder) as entries:
        found = sorted((entry.name, entry.is_dir()) for entry in entries)
    for entry, is_folder in found:
        inside = os.path.join(name, entry) if name else entry
        if is_folder:
            yield from _below(os.path.join(folder, entry), inside)
        elif entry.lower().endswith(SUFFIXES):
            yield inside
