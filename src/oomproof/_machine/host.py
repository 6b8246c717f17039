"""Memory of this machine and of this process, as far as the kernel tells. A control group is a machine.

Where it is read from can be handed in, so that tests can describe any machine.
"""

from __future__ import annotations

import os
import pathlib
import re

_ROOT = pathlib.Path("/")


def total(root: pathlib.Path = _ROOT) -> int | None:
    """Bytes of RAM that this process and its kin may use; `None` where that cannot be read."""
    machine, limit = meminfo(root).get("MemTotal"), cgroup_limits(root)[0]
    known = [size for size in (machine, limit) if size is not None]
    return min(known, default=None)


def available(root: pathlib.Path = _ROOT) -> int | None:
    """Bytes of RAM that can still be taken without swapping; `None` where that cannot be read."""
    machine = meminfo(root).get("MemAvailable")
    limit, used = cgroup_limits(root)
    inside = None if limit is None or used is None else max(0, limit - used)
    known = [size for size in (machine, inside) if size is not None]
    return min(known, default=None)


def resident(root: pathlib.Path = _ROOT, pid: int | None = None) -> int | None:
    """Bytes of RAM that this process and the processes it started hold; `None` where that cannot be read.

    Pages that they share (what a forked worker has not written to) count once, where the kernel says so.
    """
    family = _family(root, os.getpid() if pid is None else pid)
    # What one process shares with strangers (libraries) it holds all the same; what kin share is held once.
    names = ("VmRSS",) if len(family) == 1 else ("Pss", "VmRSS")
    found = [_held(root / "proc" / str(each), names) for each in family]
    known = [size for size in found if size is not None]
    return sum(known) if known else None


_FILES = {"Pss": "smaps_rollup", "VmRSS": "status"}


def _held(folder: pathlib.Path, names: tuple[str, ...]) -> int | None:
    for name in names:
        for line in lines(folder / _FILES[name]):
            if found := re.match(rf"{name}:\s+(\d+) kB", line):
                return int(found[1]) * 1024
    return None


def _family(root: pathlib.Path, pid: int) -> list[int]:
    """This process and all that it started, directly or not."""
    family = [pid]
    for each in family:
        for tasks in sorted((root / "proc" / str(each) / "task").glob("*/children")):
            family += [int(child) for line in lines(tasks) for child in line.split()]
    return family


def meminfo(root: pathlib.Path = _ROOT) -> dict[str, int]:
    """{name: bytes} of what /proc/meminfo says."""
    text = "\n".join(lines(root / "proc/meminfo"))
    return {name: int(size) * 1024 for name, size in re.findall(r"^(\w+):\s+(\d+) kB", text, flags=re.MULTILINE)}


def cgroup_limits(root: pathlib.Path = _ROOT) -> tuple[int | None, int | None]:
    """(limit, use) of the control groups this process is in, of version 2 or 1; the tightest limit counts."""
    groups = lines(root / "proc/self/cgroup")
    found: list[tuple[int, int | None]] = []
    for line in groups or ["0::/"]:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers == "":
            base, limit, use = root / "sys/fs/cgroup", "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            base, limit, use = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        folder = base / path.strip("/")
        # A limit of a group above counts as well. In a container the path may not be there at all.
        for each in (folder, *folder.parents):
            size = _number(each / limit)
            # Version 1 writes a number near the largest there is for "none".
            if size is not None and size < 2**60:
                found.append((size, _number(each / use)))
            if each == base:
                break
    return min(found, default=(None, None), key=lambda each: each[0] or 0)


def lines(path: pathlib.Path) -> list[str]:
    """The lines of a file; none where it cannot be read."""
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def _number(path: pathlib.Path) -> int | None:
    found = lines(path)
    return int(found[0]) if found and found[0].strip().isdecimal() else None
