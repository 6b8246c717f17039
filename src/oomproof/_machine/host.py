"""Memory of this machine and of this process. A control group counts as a machine."""

from __future__ import annotations

import contextlib
import functools
import os
import pathlib

import psutil

_ROOT = pathlib.Path("/")


def total() -> int | None:
    """Bytes of RAM that this process and its kin may use; `None` where that cannot be read."""
    machine, limit = machine_memory()[0], cgroup_limits()[0]
    return min((size for size in (machine, limit) if size is not None), default=None)


def available() -> int | None:
    """Bytes of RAM that can still be taken without swapping; `None` where that cannot be read."""
    machine = machine_memory()[1]
    limit, used = cgroup_limits()
    inside = None if limit is None or used is None else max(0, limit - used)
    return min((size for size in (machine, inside) if size is not None), default=None)


def resident(pid: int | None = None) -> int | None:
    """Bytes of RAM that this process and the processes it started hold; `None` where that cannot be read.

    Pages that they share (what a forked worker has not written to) count once, where the system says so.
    """
    try:
        family = _family(os.getpid() if pid is None else pid)
    except (OSError, psutil.Error):
        return None
    # What one process shares with strangers (libraries) it holds all the same; what kin share is held once.
    held = [_held(each, shared_once=len(family) > 1) for each in family]
    known = [size for size in held if size is not None]
    return sum(known) if known else None


def machine_memory() -> tuple[int | None, int | None]:
    """(RAM, what can still be taken of it) of the machine, whatever control group this is."""
    try:
        memory = psutil.virtual_memory()
    except (OSError, psutil.Error):
        return None, None
    return memory.total, memory.available


def swap() -> int | None:
    """Bytes of swap; `None` where that cannot be read."""
    try:
        return psutil.swap_memory().total
    except (OSError, psutil.Error):
        return None


def _held(pid: int, shared_once: bool) -> int | None:
    try:
        process = _process(pid)
        return (_proportional(process) if shared_once else 0) or process.memory_info().rss
    except (OSError, psutil.Error):
        return None  # It has ended.


def _proportional(process: psutil.Process) -> int:
    """Bytes with a part of each page that is shared; 0 where the system does not say."""
    try:
        return int(getattr(process.memory_full_info(), "pss", 0))
    except (OSError, psutil.Error):
        return 0


# Making one takes longer than asking it.
_process = functools.lru_cache(maxsize=64)(psutil.Process)


def _family(pid: int) -> list[int]:
    """This process and all that it started, directly or not."""
    if not _kernel_lists_children():
        return [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]
    family = [pid]
    for each in family:
        family += _children(each)
    return family


@functools.cache
def _kernel_lists_children() -> bool:
    return os.path.exists(f"/proc/{os.getpid()}/task/{os.getpid()}/children")


def _children(pid: int) -> list[int]:
    """The processes that a process started, by the kernel's own list.

    psutil would look at every process of the machine. That takes a hundred times as long, and this runs in training.
    """
    found: list[int] = []
    # Threads and processes may end while they are looked at.
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{task}/children", "rb") as file:
                found += map(int, file.read().split())
    return found


def cgroup_limits(root: pathlib.Path = _ROOT) -> tuple[int | None, int | None]:
    """(limit, use) of the control groups this process is in, of version 2 or 1; the tightest limit counts."""
    groups = _lines(root / "proc/self/cgroup")
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


def _lines(path: pathlib.Path) -> list[str]:
    """The lines of a file; none where it cannot be read."""
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def _number(path: pathlib.Path) -> int | None:
    found = _lines(path)
    return int(found[0]) if found and found[0].strip().isdecimal() else None
