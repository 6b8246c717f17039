"""A chain of equal segments, ways to run it, and requests for plans."""

from __future__ import annotations

import dataclasses
import pathlib

from oomproof._planning import remat
from oomproof._planning.options import Request
from oomproof._planning.ways import Way
from oomproof._records.plan import Alternative, Plan
from oomproof._records.trace import Chain, Segment

GOLDEN = pathlib.Path(__file__).parent / "golden"
MIB, GIB = 2**20, 2**30
EXACT = frozenset({"microbatch", "recompute"})
EVERYTHING = frozenset({"microbatch", "recompute", "xla", "mixed_precision", "batch_statistics"})
CAVEATS = ("BatchNormalization 'bn' sees fewer samples",)

SEGMENTS = tuple(
    Segment(
        first=f"{index}_conv",
        last=f"{index}_add",
        kept=GIB,
        crossing=(GIB // 4,),
        work=GIB // 2,
        gradients=16 * MIB,
        cost=1 / 9,
    )
    for index in range(9)
)
CHAIN = Chain(
    batch_size=1024,
    segments=SEGMENTS,
    resident=GIB,
    inputs=GIB // 4,
    outside=GIB // 8,
    update=GIB // 2,
    peak=12 * GIB,
)
OWN = Way(jit=False, own=True, precision="float32", exact=True, chain=CHAIN, speed=1.0, piece_cost=0.04)
XLA = dataclasses.replace(OWN, jit=True, own=False, speed=0.8, equal_pieces_only=True)
MIXED = dataclasses.replace(
    OWN,
    own=False,
    precision="mixed_bfloat16",
    exact=False,
    chain=dataclasses.replace(CHAIN, segments=remat.scaled(CHAIN.segments, 512, 1024), peak=7 * GIB),
    speed=0.6,
)


def asked(limit: float, allowed: frozenset[str] = EXACT, **more: object) -> Request:
    fields = {"batch_size": 1024, "margin": 1.0, **more}
    return Request(limit=int(limit * GIB), allowed=allowed, **fields)  # type: ignore[arg-type]


def row(plan: Plan, name: str) -> Alternative:
    return next(each for each in plan.alternatives if each.name == name)
