"""Arrays in files and folders of images, found and read without a framework."""

from __future__ import annotations

import os

import h5py
import numpy as np
import pytest

from oomproof.data.sources import array_files
from oomproof.data.sources.array_files import Column, NpyColumn, column_of
from oomproof.data.sources.image_index import indexed

X = np.arange(6000, dtype=np.int16).reshape(500, 4, 3)


@pytest.fixture(autouse=True)
def no_file_is_small(monkeypatch) -> None:
    monkeypatch.setattr(array_files, "_SMALL_BYTES", 0)


@pytest.fixture
def places(tmp_path):
    np.save(tmp_path / "x.npy", X)
    np.savez(tmp_path / "x.npz", first=np.zeros(3), x=X)
    np.savez_compressed(tmp_path / "small.npz", x=X)
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file.create_dataset("group/x", data=X, chunks=(7, 4, 3))
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    return {
        "array": X,
        "npy": tmp_path / "x.npy",
        "npz": f"{tmp_path}/x.npz:x",
        "compressed": f"{tmp_path}/small.npz:x",
        "hdf5": f"{tmp_path}/x.h5:group/x",
        "map": mapped,
        "private map": np.load(tmp_path / "x.npy", mmap_mode="c"),
    }


KINDS = ["array", "npy", "npz", "compressed", "hdf5", "map", "private map"]


@pytest.mark.parametrize("kind", KINDS)
def test_samples_by_number(places, kind) -> None:
    column = column_of(places[kind], "x")
    assert len(column) == 500
    rng = np.random.default_rng(0)
    for indices in (np.arange(500), np.arange(90, 130), np.sort(rng.permutation(500)[:64]), np.array([499])):
        np.testing.assert_array_equal(column.take(indices), X[indices])


def test_rows_go_where_they_belong(places) -> None:
    column = column_of(places["npy"], "x")
    assert isinstance(column, NpyColumn)
    for wanted in (np.array([7, 3, 4, 5, 400, 2]), np.array([9, 8, 7, 6]), np.random.default_rng(1).permutation(500)):
        ranks = np.argsort(wanted)
        np.testing.assert_array_equal(column.take(wanted[ranks], ranks), X[wanted])


def test_a_stretch_of_a_map_is_read_from_its_file(places) -> None:
    for part in (slice(100, 300), slice(0, 5), slice(499, 500)):
        column = column_of(places["map"][part], "x")
        assert isinstance(column, NpyColumn)
        np.testing.assert_array_equal(column.take(np.arange(len(column))), X[part])
    assert not isinstance(column_of(places["map"][::2], "x"), NpyColumn)


def test_a_private_map_keeps_its_changes(places) -> None:
    changed = places["private map"]
    changed[3] = -1
    assert (column_of(changed, "x").take(np.array([3])) == -1).all()


def test_batches_are_copies() -> None:
    array = np.zeros((4, 2))
    batch = Column(array, "x").take(np.arange(4))
    array[:] = 1
    assert (batch == 0).all()


def test_files_that_are_cut_short_or_strange(tmp_path) -> None:
    np.save(tmp_path / "x.npy", X)
    os.truncate(tmp_path / "x.npy", 5000)
    with pytest.raises(ValueError, match=r"truncated: .* 500 samples of 24 B, 12,000 bytes, but it has 4,872"):
        column_of(tmp_path / "x.npy", "x")
    np.save(tmp_path / "f.npy", np.asfortranarray(X))
    with pytest.raises(ValueError, match="Fortran"):
        column_of(tmp_path / "f.npy", "x")
    np.save(tmp_path / "o.npy", np.array([{}, []], object))
    with pytest.raises(TypeError, match="dtype object"):
        column_of(tmp_path / "o.npy", "x")
    (tmp_path / "t.npy").write_text("no array")
    with pytest.raises(ValueError, match=r"t\.npy is not a readable \.npy file"):
        column_of(tmp_path / "t.npy", "x")
    with pytest.raises(FileNotFoundError, match="gone"):
        column_of("gone.npy", "x")
    with pytest.raises(ValueError, match=r"Received: x='x\.csv'"):
        column_of("x.csv", "x")


def test_large_compressed_arrays_are_refused_with_their_size(tmp_path, monkeypatch) -> None:
    np.savez_compressed(tmp_path / "x.npz", x=X)
    monkeypatch.setattr(array_files, "_LOADED_BYTES", 1000)
    with pytest.raises(ValueError, match=r"'x' in .*x\.npz is compressed: .* 12,128 bytes"):
        column_of(f"{tmp_path}/x.npz:x", "x")


def test_names_that_a_file_does_not_have(places) -> None:
    with pytest.raises(ValueError, match=r"datasets in .*x\.h5: group/x\. Received: 'y'"):
        column_of(places["hdf5"].replace("group/x", "y"), "x")
    with pytest.raises(ValueError, match=r"arrays in .*: first, x\. Received: 'z'"):
        column_of(places["npz"][:-1] + "z", "x")


# Folders


def make(folder, *names):
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"")


def test_classes_and_files_in_the_order_of_their_names(tmp_path) -> None:
    make(tmp_path, "b/2.JPG", "b/1.png", "a/sub/3.webp", "a/x.txt", "a/0.gif", ".git/4.jpg", "top.jpg", "ünï/5.bmp")
    paths, labels, classes = indexed(tmp_path, True, None)
    assert classes == ["a", "b", "ünï"]
    names = [os.path.relpath(paths[i], tmp_path) for i in range(len(paths))]
    assert names == ["a/0.gif", "a/sub/3.webp", "b/1.png", "b/2.JPG", "ünï/5.bmp"]
    assert labels.tolist() == [0, 0, 1, 1, 2]


def test_chosen_classes(tmp_path) -> None:
    make(tmp_path, "a/1.jpg", "b/1.jpg", "c/1.jpg")
    paths, labels, _ = indexed(tmp_path, True, ["c", "a"])
    assert [paths[0][-7:], paths[1][-7:]] == ["c/1.jpg", "a/1.jpg"]
    assert labels.tolist() == [0, 1]
    with pytest.raises(ValueError, match=r"class_names with 'd'; there are 'a', 'b', 'c'"):
        indexed(tmp_path, True, ["d"])


def test_folders_without_images(tmp_path) -> None:
    with pytest.raises(FileNotFoundError, match="nowhere"):
        indexed(tmp_path / "nowhere", True, None)
    with pytest.raises(ValueError, match="no folders there"):
        indexed(tmp_path, True, None)
    make(tmp_path, "a/1.txt")
    with pytest.raises(ValueError, match="none in 1 folders"):
        indexed(tmp_path, True, None)
    with pytest.raises(NotADirectoryError):
        indexed(tmp_path / "a" / "1.txt", True, None)
