"""The design the estimates are judged on: as the file has it, complete, and split so that scoring is honest."""

from __future__ import annotations

import collections
import itertools

import pytest

import design
from zoo_table import LEVELS, OPTIMIZERS, PRECISIONS, STACKS, TROUBLES, ZOO

WRITTEN = design.written()
RUNS = WRITTEN["runs"]
FACTORS = {
    "model": [entry.name for entry in ZOO],
    "level": LEVELS,
    "precision": PRECISIONS,
    "optimizer": OPTIMIZERS,
    "stack": STACKS,
}


def test_the_file_is_what_the_script_writes():
    assert design.design() == design.design() == WRITTEN
    assert design.PATH.read_text() == design.text(WRITTEN)


def test_there_are_enough_models_and_runs():
    assert len(set(FACTORS["model"])) == len(ZOO) >= 24
    assert 110 <= len(RUNS) <= 130
    assert len({run["id"] for run in RUNS}) == len(RUNS)
    assert all(list(entry.batches) == sorted(set(entry.batches)) for entry in ZOO)


@pytest.mark.parametrize(("a", "b"), list(itertools.combinations(FACTORS, 2)))
def test_any_two_levels_of_two_factors_meet(a, b):
    met = {(run[a], run[b]) for run in RUNS}
    assert met == set(itertools.product(FACTORS[a], FACTORS[b]))


@pytest.mark.parametrize("half", ["tuning", "scoring"])
@pytest.mark.parametrize(("a", "b"), list(itertools.combinations([f for f in FACTORS if f != "model"], 2)))
def test_so_they_do_within_each_half(half, a, b):
    met = {(run[a], run[b]) for run in RUNS if run["half"] == half}
    assert met == set(itertools.product(FACTORS[a], FACTORS[b]))


def test_no_family_is_in_both_halves_and_both_have_every_kind():
    halves = collections.defaultdict(set)
    kinds = collections.defaultdict(set)
    for run in RUNS:
        halves[run["family"]].add(run["half"])
        kinds[run["half"]].add(run["kind"])
    assert all(len(found) == 1 for found in halves.values())
    assert kinds["tuning"] == kinds["scoring"] == {"convolutional", "attention", "recurrent", "dense"}
    sizes = collections.Counter(run["half"] for run in RUNS)
    assert abs(sizes["tuning"] - sizes["scoring"]) <= len(RUNS) * 0.1


def test_what_was_measured_before_the_design_scores_nothing():
    assert all(run["half"] == "tuning" for run in RUNS if run["family"] in design.SEEN)


def test_known_troubles_are_in_the_runs_with_limit_and_reason():
    for run in RUNS:
        trouble = [t for t in TROUBLES if (t.kind, t.stack) == (run["kind"], run["stack"])]
        assert (run["limit_s"], run["trouble"]) == (
            (trouble[0].limit_s, trouble[0].reason) if trouble else (None, None)
        )
    assert any(run["trouble"] for run in RUNS)


def test_runs_agree_with_the_table():
    table = {entry.name: entry for entry in ZOO}
    for run in RUNS:
        entry = table[run["model"]]
        assert (run["family"], run["kind"], run["batch"]) == (entry.family, entry.kind, entry.batch(run["level"]))


def test_largest_batches_are_searched_for_in_the_scoring_half_only():
    halves = {run["model"]: run["half"] for run in RUNS}
    assert len(WRITTEN["largest_batch"]) == 8
    assert all(halves[name] == "scoring" for name in WRITTEN["largest_batch"])
