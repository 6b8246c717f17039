"""`oomproof doctor`"""

from __future__ import annotations

import typer

from oomproof._cli import common


def doctor(json: common.Json = False) -> None:
    """Check this machine before you train.

    Looks at devices and who uses them, settings, versions, memory and its limits.

    Exit code: 3 if there is a problem, 0 otherwise.
    """
    from oomproof._doctor.checks import check

    found = check()
    common.show(found, json)
    if found.worst == "problem":
        raise typer.Exit(3)
