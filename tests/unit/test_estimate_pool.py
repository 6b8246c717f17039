"""Runs side by side: what is kept of one that ends well, badly, or not at all. The worker is a small script."""

from __future__ import annotations

import textwrap
import time

import pytest

import pool
from pool import Task

WORKER = """
    import json, os, sys, time
    case = json.loads(sys.argv[1])
    print('@@ {"stage": "first step", "backend": "%s"}' % os.environ["KERAS_BACKEND"], flush=True)
    print("noise of a framework")
    if case["does"] == "hang":
        time.sleep(60)
    elif case["does"] == "abort":
        sys.stderr.write("F allocator: out of memory while growing")
        os.abort()
    elif case["does"] == "break":
        sys.exit("something else")
    print('@@ {"stage": "done", "outcome": "finished"}')
"""


@pytest.fixture(autouse=True)
def _worker(tmp_path, monkeypatch):
    script = tmp_path / "worker.py"
    script.write_text(textwrap.dedent(WORKER))
    monkeypatch.setattr(pool, "WORKER", script)


def task(does, share=0.1, limit_s=30.0):
    return Task({"does": does, "stack": "tensorflow-xla", "device": "cpu", "room": None}, share, limit_s)


def run(tasks, jobs=2, then=lambda task, result: [], deadline=None):
    found = []
    left = pool.run(tasks, jobs, lambda task, result: found.append(result) or then(task, result), deadline)
    return found, left


def test_a_run_that_ends_well_is_kept_with_what_it_told():
    [result], left = run([task("work")])
    assert (result["outcome"], result["stage"], result["backend"], left) == ("finished", "done", "tensorflow", [])


def test_a_run_past_its_limit_is_stopped_and_counts_as_not_finished():
    began = time.monotonic()
    [result], _ = run([task("hang", limit_s=5)])
    assert (result["outcome"], result["stage"]) == ("not finished", "first step")
    assert time.monotonic() - began < 30


@pytest.mark.parametrize(("does", "outcome"), [("abort", "out of memory"), ("break", "failed")])
def test_a_process_that_dies_says_why(does, outcome):
    [result], _ = run([task(does)])
    assert result["outcome"] == outcome
    assert result["error"]


def test_what_a_result_leads_to_is_run_next():
    follow = iter([[task("break")], [], []])
    found, _ = run([task("work"), task("work")], jobs=1, then=lambda task, result: next(follow))
    assert [result["outcome"] for result in found] == ["finished", "failed", "finished"]


def test_runs_wait_for_room():
    big = task("hang", share=0.8, limit_s=3)
    found, _ = run([big, task("work", share=0.8)], jobs=2)
    assert [result["outcome"] for result in found] == ["not finished", "finished"]


def test_at_the_deadline_what_is_left_is_given_back():
    tasks = [task("hang"), task("hang"), task("work")]
    found, left = run(tasks, jobs=2, deadline=time.monotonic() + 1)
    assert found == []
    assert left == tasks
