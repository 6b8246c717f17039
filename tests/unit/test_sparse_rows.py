"""How rows of sparse gradients join: pure, though it lies with TensorFlow, which alone has such gradients."""

import importlib.util
import pathlib

import pytest

FILE = pathlib.Path(__file__).parents[2] / "src" / "oomproof" / "_backends" / "tensorflow" / "sparse_rows.py"
spec = importlib.util.spec_from_file_location("sparse_rows", FILE)
sparse_rows = importlib.util.module_from_spec(spec)
spec.loader.exec_module(sparse_rows)


@pytest.mark.parametrize(
    ("one", "several", "twice", "sparse", "join"),
    [
        ([3, 3, 5], [3, 3, 5, 1, 2, 2], [3, 3, 5, 3, 3, 5], False, "apart"),
        ([], [], [], False, "apart"),
        ([0, 1, 2], [0, 1, 2], [0, 1, 2], False, "shared"),
        ([0, 0, 1], [0, 0, 1], [0, 0, 1], False, "shared"),
        ([0, 2], [0, 2, 3], [0, 2], True, "merged"),
        # All columns are in use by chance.
        ([0, 1, 2], [0, 1, 2], [0, 1, 2], True, "merged"),
        # Tokens beside positions, from one table.
        ([7, 8, 0, 1], [7, 8, 9, 5, 0, 1], [7, 8, 7, 8, 0, 1], False, "mixed"),
        ([1, 1], [1, 1, 2], [1, 1], False, "mixed"),
    ],
)
def test_how_rows_join(one, several, twice, sparse, join):
    assert sparse_rows.how_rows_join(one, several, twice, sparse) == join
