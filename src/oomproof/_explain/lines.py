"""Anything that holds text → blocks of whole lines, in constant memory, and lines that are safe to print.

A log may be a gigabyte, have lines of megabytes, be cut off, be binary, or be full of terminal escapes.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable, Iterator
from typing import Any

_BLOCK = 1 << 18
# No part of a line that is looked at is longer than this, so that no pattern meets more.
WIDTH = 4096
_OVERLAP = 400
_EVIDENCE = 240
_ESCAPES = re.compile(
    rb"\x1b\[[0-?]*[ -/]*[@-~]|\x1b[\]PX^_][^\x07\x1b\n]{0,1000}(?:\x07|\x1b\\)?|\x1b[ -/]*[0-~]|"
    rb"\xc2\x9b[0-?]*[ -/]*[@-~]"
)
_PREFIX = re.compile(
    r"\s*(?:\[?(?:default|rank ?)\d+\]?:|\[\d+,\d+\]<std\w+>:|\([^()]{0,60}pid=\d+[^()]{0,60}\)|"
    r"(?:stdout|stderr)(?: [FP]\b|:)|"
    r"\[?\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)?\]?:?|\d{1,3}: |"
    r"\[?(?:INFO|WARNING|ERROR|CRITICAL|DEBUG)\]?\s*[:|-]?\s|\[\s*\d+\.\d+\]|"
    r"[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d \S+ kernel:|[-|] )\s*"
)
_PREFIXES = 6
_BYTE_ORDERS = {codecs.BOM_UTF16_LE: "utf-16-le", codecs.BOM_UTF16_BE: "utf-16-be"}


def blocks(source: Any) -> Iterator[tuple[int, bytes]]:
    """(number of the first line, some lines) from a file, a string or lines. The last line of a block may go on in the
    next one, under the same number, if it is very long."""
    number, rest = 1, b""
    for chunk in _decoded(_chunks(source)):
        data = rest + chunk
        end = data.rfind(b"\n") + 1
        if end == 0 and len(data) < _BLOCK:
            rest = data
            continue
        if end == 0:
            # A line without an end: what is at the seam is seen twice.
            yield number, data
            rest = data[-_OVERLAP:]
            continue
        whole, rest = data[:end], data[end:]
        yield number, whole
        number += whole.count(b"\n")
    if rest:
        yield number, rest


def _chunks(source: Any) -> Iterator[bytes]:
    if isinstance(source, str):
        for start in range(0, len(source), _BLOCK):
            yield _encoded(source[start : start + _BLOCK])
    elif isinstance(source, bytes | bytearray):
        for start in range(0, len(source), _BLOCK):
            yield bytes(source[start : start + _BLOCK])
    elif hasattr(source, "read"):
        while chunk := source.read(_BLOCK):
            yield _encoded(chunk)
    else:
        yield from _joined(source)


def _joined(lines: Iterable[str | bytes]) -> Iterator[bytes]:
    held: list[bytes] = []
    size = 0
    for line in lines:
        if not isinstance(line, str | bytes):
            raise TypeError(f"Expected lines of text. Received a line of type {type(line).__name__}")
        line = _encoded(line)
        held.append(line if line.endswith(b"\n") else line + b"\n")
        size += len(held[-1])
        if size >= _BLOCK:
            yield b"".join(held)
            held, size = [], 0
    yield b"".join(held)


def _encoded(text: str | bytes) -> bytes:
    return text.encode("utf-8", "replace") if isinstance(text, str) else bytes(text)


def _decoded(chunks: Iterator[bytes]) -> Iterator[bytes]:
    """Windows writes what is piped into a file in UTF-16, with a mark."""
    decoder = None
    for index, chunk in enumerate(chunks):
        if index == 0 and chunk[:2] in _BYTE_ORDERS:
            decoder = codecs.getincrementaldecoder(_BYTE_ORDERS[chunk[:2]])("replace")
            chunk = chunk[2:]
        yield _encoded(decoder.decode(chunk)) if decoder else chunk


def without_escapes(block: bytes) -> bytes:
    return _ESCAPES.sub(b"", block) if b"\x1b" in block or b"\x9b" in block else block


def line_around(block: bytes, at: int) -> tuple[int, int]:
    """(start, stop) of the line that a byte is in, or of a part of it where it is long.

    Progress bars return to the start of a line, so that counts as an end too.
    """
    start = block.rfind(b"\n", 0, at) + 1
    stop = block.find(b"\n", at)
    stop = len(block) if stop < 0 else stop
    start = max(start, block.rfind(b"\r", start, at) + 1)
    if (cut := block.find(b"\r", at, stop)) >= 0:
        stop = cut
    if stop - start > WIDTH:
        step = WIDTH - _OVERLAP
        start += max(0, at - start - _OVERLAP) // step * step
        stop = min(stop, start + WIDTH)
    return start, stop


def clean(part: bytes) -> str:
    """Text that does nothing to a terminal: whatever is not printable is gone, line separators and marks included."""
    text = part.decode("utf-8", "replace").replace("\t", " ")
    if text.isascii() and text.isprintable():
        return text
    return "".join(character for character in text if character.isprintable())


def bare(line: str) -> str:
    """A line without what launchers and loggers put before it: ranks, times, streams, process numbers."""
    if "&" in line:
        # A log that was copied from a page. Brackets stay as they are: nothing becomes markup here.
        for name, letter in (("&#39;", "'"), ("&#x27;", "'"), ("&apos;", "'"), ("&quot;", '"')):
            line = line.replace(name, letter)
    for _ in range(_PREFIXES):
        found = _PREFIX.match(line)
        if found is None or not found[0]:
            break
        line = line[found.end() :]
    return line


def shortened(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= _EVIDENCE else text[: _EVIDENCE - 1] + "…"
