"""Which runs the estimates are judged on: a fractional design over models, batch sizes, precisions, optimizers, stacks.

    python benchmarks/estimate/design.py          writes benchmarks/estimate/design.json, always the same

Every model runs once on each stack. Its four runs have all batch levels, all precisions and both optimizers among them,
dealt so that any two levels of any two factors meet, and as evenly as possible within each half. The halves part the
families: the tuning half may be looked at while engines are made, only the scoring half is quoted.
"""

from __future__ import annotations

import collections
import itertools
import json
import pathlib
import random
from typing import Any

from zoo_table import LEVELS, OPTIMIZERS, PRECISIONS, STACKS, TROUBLES, ZOO, Entry

PATH = pathlib.Path(__file__).parent / "design.json"
FACTORS = ("model", "level", "precision", "optimizer", "stack")
SEED = 2026
# Peaks of these were known before there was a design, and engines were thought out on them: they can score nothing.
SEEN = ("plain-cnn", "residual", "depthwise", "encoder", "lstm")
# How many models of each kind the largest batch is searched for, each search being many runs.
SEARCHED = {"convolutional": 3, "attention": 2, "recurrent": 2, "dense": 1}
_DEALS = 300


def split() -> dict[str, str]:
    """Family → half. Within each kind of net the halves get equally many models, as far as that goes."""
    models = collections.Counter(entry.family for entry in ZOO)
    kinds = {entry.family: entry.kind for entry in ZOO}
    halves = dict.fromkeys(SEEN, "tuning")
    unseen = [family for family in models if family not in halves]
    random.Random(SEED).shuffle(unseen)
    for family in unseen:
        held = collections.Counter[str]()
        for other, half in halves.items():
            held[half] += models[other] * (kinds[other] == kinds[family])
        halves[family] = "scoring" if held["scoring"] <= held["tuning"] else "tuning"
    return {family: halves[family] for family in models}


def design() -> dict[str, Any]:
    """The whole design, as it is written to the file."""
    halves = split()
    rng = random.Random(SEED)
    met: dict[str, collections.Counter[tuple[Any, ...]]] = {
        "tuning": collections.Counter(),
        "scoring": collections.Counter(),
    }
    runs = []
    for entry in ZOO:
        counts = met[halves[entry.family]]
        deals = [_deal(entry, rng) for _ in range(_DEALS)]
        best = min(deals, key=lambda deal: _crowding(deal, counts))
        counts.update(pair for run in best for pair in pairs(run))
        runs += [_described(entry, halves[entry.family], run) for run in best]
    return {
        "seed": SEED,
        "halves": halves,
        "largest_batch": _searched(halves),
        "runs": runs,
    }


def pairs(run: dict[str, Any]) -> list[tuple[Any, ...]]:
    """The pairs of levels that meet in a run."""
    return [(a, run[a], b, run[b]) for a, b in itertools.combinations(FACTORS, 2)]


def written() -> dict[str, Any]:
    """The design in the file."""
    found: dict[str, Any] = json.loads(PATH.read_text())
    return found


def text(found: dict[str, Any]) -> str:
    """JSON with one run to a line."""
    head = {key: value for key, value in found.items() if key != "runs"}
    lines = ",\n".join(f"    {json.dumps(run)}" for run in found["runs"])
    return json.dumps(head, indent=2).removesuffix("\n}") + f',\n  "runs": [\n{lines}\n  ]\n}}\n'


def _deal(entry: Entry, rng: random.Random) -> list[dict[str, Any]]:
    """One run for each stack, the other factors dealt at random. What is most used comes up most often."""
    hands = ([*LEVELS, rng.choice(LEVELS)], [*PRECISIONS, "float32"], [*OPTIMIZERS, "adam", "adam"])
    for hand in hands:
        rng.shuffle(hand)
    return [dict(zip(FACTORS, (entry.name, *drawn), strict=True)) for drawn in zip(*hands, STACKS, strict=True)]


def _crowding(deal: list[dict[str, Any]], counts: collections.Counter[tuple[Any, ...]]) -> int:
    after = collections.Counter(pair for run in deal for pair in pairs(run))
    return sum((counts[pair] + more) ** 2 - counts[pair] ** 2 for pair, more in after.items())


def _described(entry: Entry, half: str, run: dict[str, Any]) -> dict[str, Any]:
    trouble = next((t for t in TROUBLES if (t.kind, t.stack) == (entry.kind, run["stack"])), None)
    return {
        "id": "-".join(run[factor] for factor in FACTORS),
        **run,
        "batch": entry.batch(run["level"]),
        "family": entry.family,
        "kind": entry.kind,
        "half": half,
        "limit_s": trouble.limit_s if trouble else None,
        "trouble": trouble.reason if trouble else None,
    }


def _searched(halves: dict[str, str]) -> list[str]:
    scoring = [entry for entry in ZOO if halves[entry.family] == "scoring"]
    return [
        entry.name
        for kind, count in SEARCHED.items()
        for entry in [entry for entry in scoring if entry.kind == kind][:count]
    ]


def main() -> None:
    found = design()
    PATH.write_text(text(found))
    print(f"{len(found['runs'])} runs over {len(ZOO)} models, written to {PATH.name}")


if __name__ == "__main__":
    main()
