"""`oomproof gpus`"""

from __future__ import annotations


def gpus() -> None:
    """List the known cards and the usable memory of each."""
    from rich.console import Console
    from rich.table import Table

    from oomproof._machine import gpus as devices
    from oomproof._records.units import format_bytes

    table = Table(box=None, pad_edge=False)
    for title in ("card", "memory", "TensorFlow", "JAX", "torch", "compute capability"):
        table.add_column(title, justify="left" if title == "card" else "right")
    here = devices.local()
    for gpu in ([here] if here else []) + list(devices.CATALOGUE.values()):
        usable = [format_bytes(gpu.usable(name)) for name in ("tensorflow", "jax", "torch")]
        name = f"{gpu.name} (in this machine)" if gpu is here else gpu.name
        table.add_row(name, format_bytes(gpu.memory), *usable, ".".join(map(str, gpu.capability)))
    Console().print(table)
