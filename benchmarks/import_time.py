"""How long `import oomproof` takes in a fresh interpreter. The house rule is under 0.2 s, and no framework."""

from __future__ import annotations

import statistics
import subprocess
import sys

from _common import write_result

_REPEATS = 15
_LIMIT_S = 0.2
_CODE = "import time; start = time.perf_counter(); import oomproof; print(time.perf_counter() - start)"


def main() -> None:
    command = [sys.executable, "-c", _CODE]
    times = [float(subprocess.run(command, capture_output=True, text=True, check=True).stdout) for _ in range(_REPEATS)]
    median = statistics.median(times)
    write_result(
        "import_time",
        {"median_s": median, "worst_s": max(times), "limit_s": _LIMIT_S, "within_limit": median < _LIMIT_S},
    )


if __name__ == "__main__":
    main()
