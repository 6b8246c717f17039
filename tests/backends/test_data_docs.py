"""The code in docs/data.md runs as it is printed, and prints what it is said to."""

import contextlib
import io
import pathlib
import re

import keras
import numpy as np
from here import only

import oomproof

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "data.md"
BLOCK = re.compile(r"```python\n(.*?)```(?:\n\n```text\n(.*?)```)?", flags=re.DOTALL)


def shape_of(text):
    """Without what differs between machines: sizes, and how many calls there are in flight."""
    return [re.sub(r"[\d.]+ (?:[KMGT]i)?B|\d+ calls", "…", re.sub(r" +", " ", line)) for line in text.splitlines()]


@only("tensorflow", because="tf.data pipelines: `oomproof.data.audit` and `tune`")
def test_data_page(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    namespace = {"keras": keras, "np": np, "oomproof": oomproof}
    blocks = BLOCK.findall(PAGE.read_text())
    assert len(blocks) >= 12
    for code, printed in blocks:
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            exec(code, namespace)
        assert shape_of(out.getvalue()) == shape_of(printed), code
