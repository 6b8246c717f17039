"""explain reads anything: large, cut off, binary, or written to do harm."""

import io
import itertools
import os
import random
import time

import pytest
from explain_texts import BY_CAUSE, torch_text

import oomproof
from oomproof._explain import lines

WORDS = [*BY_CAUSE.values(), "Killed\n", "MemoryError\n", "Epoch 3/9\n", "step 7 loss 0.1\n", "exit code 137\n"]
NASTY = [
    "\x1b[2J\x1b]0;title\x07",
    "\x1b]8;;http://example.org\x1b\\link",
    "\x00\x01\x02",
    "‮txet desrever⁦",
    "<script>alert(1)</script>",
    "[bold red]markup[/bold red]",
    "$(touch hacked) `touch hacked`",
    "\r\r\r",
    "\x9b31m",
    "\u2028\u2029",
    "{}{0}%s%n",
    "٣٣٣٣",
    "9" * 400,
    "(" * 300,
    "shape[" + "1," * 200,
]


def inputs(count: int, seed: int):
    rng = random.Random(seed)
    for _ in range(count):
        parts = []
        for _ in range(rng.randrange(1, 5)):
            text = rng.choice(WORDS + NASTY)
            if rng.random() < 0.5:
                text = text[rng.randrange(len(text)) :]
            if rng.random() < 0.5:
                text = text[: rng.randrange(len(text) + 1)]
            if rng.random() < 0.3:
                at = rng.randrange(len(text) + 1)
                text = text[:at] + rng.choice(NASTY) + text[at:]
            parts.append(text.encode("utf-8", "surrogatepass"))
        if rng.random() < 0.3:
            parts.insert(rng.randrange(len(parts) + 1), rng.randbytes(rng.randrange(200)))
        yield b"\n".join(parts)


def check(found: oomproof.Diagnosis) -> None:
    text = str(found)
    assert all(letter.isprintable() or letter == "\n" for letter in text)
    assert len(text) < 20_000
    assert found.is_memory == (found.memory != "none")
    assert not found.is_memory or found.cause not in ("not-memory",)
    assert all("touch" not in fix and "<" not in fix for fix in found.fixes)
    found.to_json()


@pytest.mark.parametrize("seed", range(10))
def test_ten_thousand_hostile_inputs(seed: int, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    for data in inputs(1000, seed):
        check(oomproof.explain(data))
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize("data", [b"", b"\n\n", b"\x00" * 10_000, b"\xff\xfe", b"\r", b"\x1b[", b"  "])
def test_nothing_to_explain(data: bytes) -> None:
    found = oomproof.explain(data)
    assert not found.is_memory
    check(found)


def test_lines_of_megabytes() -> None:
    data = b"x, " * 700_000 + torch_text().strip().encode() + b" y," * 700_000
    began = time.perf_counter()
    found = oomproof.explain(data)
    assert found.raised_by == "torch"
    assert time.perf_counter() - began < 5
    check(found)


@pytest.mark.parametrize(
    "letter", [b"(", b"[", b"{", b"=", b"a", b"1", b" ", b"node ", b"Epoch 1", b"error ", b"memory "]
)
def test_no_line_takes_long(letter: bytes) -> None:
    began = time.perf_counter()
    check(oomproof.explain(b"OOM when allocating tensor with shape[" + letter * 200_000))
    assert time.perf_counter() - began < 3


@pytest.mark.parametrize("cause", BY_CAUSE)
def test_dressed_up_the_same(cause: str) -> None:
    """Line ends, colours, prefixes, UTF-16 and the way it is handed in change nothing."""
    text = BY_CAUSE[cause]
    plain = oomproof.explain(text)

    def same(found: oomproof.Diagnosis) -> bool:
        fields = ("is_memory", "memory", "raised_by", "requested_bytes", "tensor_shape", "op", "layer", "cause")
        return all(getattr(found, field) == getattr(plain, field) for field in fields)

    assert same(oomproof.explain(text.replace("\n", "\r\n")))
    assert same(oomproof.explain("\n".join(f"\x1b[31m{line}\x1b[0m" for line in text.split("\n"))))
    assert same(oomproof.explain("\n".join(f"[rank0]: {line}" for line in text.split("\n"))))
    assert same(oomproof.explain("\n".join(f"2026-01-01T00:00:00.000Z stderr F {line}" for line in text.split("\n"))))
    assert same(oomproof.explain("\n".join(f"2026-01-01 00:00:00,123 - ERROR - {line}" for line in text.split("\n"))))
    assert same(oomproof.explain(b"\xff\xfe" + text.encode("utf-16-le")))
    assert same(oomproof.explain(io.StringIO(text)))
    assert same(oomproof.explain(io.BytesIO(text.encode())))
    assert same(oomproof.explain(text.splitlines()))
    assert same(oomproof.explain(iter(text.splitlines(keepends=True))))


def test_blocks_put_lines_together(monkeypatch) -> None:
    monkeypatch.setattr(lines, "_BLOCK", 64)
    monkeypatch.setattr(lines, "_OVERLAP", 16)
    text = "".join(f"{number:05d} some text\n" for number in range(1, 200))
    seen = {}
    for number, block in lines.blocks(io.StringIO(text)):
        for offset, line in enumerate(block.decode().splitlines()):
            seen[number + offset] = line
    assert all(line.startswith(f"{number:05d}") for number, line in seen.items())
    assert len(seen) == 199


def test_line_numbers_in_a_large_log() -> None:
    filler = [f"INFO epoch 1 step {number} loss 0.5 lr 0.1\n" for number in range(50_000)]
    found = oomproof.explain(itertools.chain(filler, [torch_text()]))
    assert found.evidence[0].line == 50_001
    assert found.cause == "leak-over-time"


def test_a_large_log_of_progress_is_no_failure() -> None:
    assert not oomproof.explain(f"epoch 1 step {number} loss 0.5\n" for number in range(100_000)).is_memory
