"""A log of 1 GB, made while it is read: how long it takes to explain, and how much memory that takes.

    python benchmarks/explain/large_log.py [BYTES]

Three logs: progress of a long run with the failure at its very end; the same with a line about memory in each step,
with words that failures have too, which is the worst case for a filter on words; and one endless line.
"""

from __future__ import annotations

import json
import pathlib
import resource
import subprocess
import sys
import time
from collections.abc import Callable

HERE = pathlib.Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from _common import write_result  # noqa: E402

_LAST = (
    b"torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 23.69 GiB "
    b"of which 512.00 MiB is free. Including non-PyTorch memory, this process has 23.15 GiB memory in use. Of the "
    b"allocated memory 22.60 GiB is allocated by PyTorch, and 110.50 MiB is reserved by PyTorch but unallocated.\n"
)


class Stream:
    """A file of a given size that is nowhere."""

    def __init__(self, size: int, made: Callable[[int], bytes]) -> None:
        self._left, self._made, self._number, self._rest = size, made, 0, b""

    def read(self, size: int) -> bytes:
        if self._left <= 0:
            last, self._rest = self._rest, b""
            return last
        block = b"".join(self._made(self._number + each) for each in range(1000))
        self._number += 1000
        self._left -= len(block)
        if self._left <= 0:
            self._rest = _LAST
        return block


def progress(number: int) -> bytes:
    figures = (number, number * 7919 % 99991, number * 104729 % 99991)
    return b"2026-01-01 12:00:00,000 INFO epoch 1 step %d loss 0.%05d accuracy 0.%05d lr 1e-05 images/s 512\n" % figures


def memory(number: int) -> bytes:
    return b"2026-01-01 12:00:00,000 INFO epoch 1 step %d loss 0.41 memory allocated 11.2 GB, exit status 0\n" % number


def endless(number: int) -> bytes:
    return b"%d, 0.%05d; " % (number, number * 7919 % 99991)


LOGS = {"progress": progress, "memory_in_each_line": memory, "one_line": endless}


def measured(name: str, size: int) -> dict[str, float | int | str]:
    import oomproof

    began = time.perf_counter()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # What making the log takes is not what explaining it takes.
    stream = Stream(size, LOGS[name])
    while stream.read(1 << 18):
        pass
    making = time.perf_counter() - began
    began = time.perf_counter()
    found = oomproof.explain(Stream(size, LOGS[name]))  # type: ignore[arg-type]
    seconds = time.perf_counter() - began - making
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {
        "bytes": size,
        "seconds": round(seconds, 1),
        "mb_per_second": round(size / 1e6 / seconds, 1),
        "peak_rss_mb": round(peak / 1024, 1),
        "rss_before_mb": round(before / 1024, 1),
        "cause": found.cause,
        "line": found.evidence[0].line,
    }


def main() -> None:
    arguments = sys.argv[1:]
    if arguments and arguments[0] in LOGS:
        print(json.dumps(measured(arguments[0], int(arguments[1]))))
        return
    size = int(arguments[0]) if arguments else 10**9
    figures = {}
    for name in LOGS:
        # A process each, so that peaks do not mix.
        command = [sys.executable, __file__, name, str(size)]
        answer = subprocess.run(command, capture_output=True, text=True, check=True)
        figures[name] = json.loads(answer.stdout)
    write_result("explain-large-log", {"command": "python benchmarks/explain/large_log.py", "logs": figures})


if __name__ == "__main__":
    main()
