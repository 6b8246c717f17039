"""A helper that fails breaks no training: what training leaves behind is what it leaves without the helper."""

import pytest
from models import check_same, classes, classifier, numbers, train

from oomproof._machine import host
from oomproof._planning import plan_cache
from oomproof._planning.planner import Planner
from oomproof._training import guarded_model
from oomproof._training.proof_cache import ProofCache


def out_of_order(*_, **__):
    raise RuntimeError("out of order")


HELPERS = {
    "Planning": (Planner, "propose_for"),
    "Feeding the data in slices": (guarded_model, "feed_in_slices"),
    "Watching the host's memory": (host, "resident"),
    "Looking for an earlier proof": (ProofCache, "key"),
    "Reading an earlier proof": (ProofCache, "recall"),
    "Remembering the proof": (plan_cache, "write"),
}


@pytest.mark.proven
@pytest.mark.parametrize("helper", HELPERS)
def test_training_goes_on_as_it_would_have(float64, helper, monkeypatch, caplog, tmp_path):
    monkeypatch.setenv("OOMPROOF_CACHE_DIR", str(tmp_path))
    data = numbers(29), classes(29)
    expected = train(classifier, *data, mode="eager")
    monkeypatch.setattr(*HELPERS[helper], out_of_order)
    guarded = {"micro_batch_size": 5, "allow": {"microbatch", "mixed_precision"}}
    received = train(classifier, *data, guard=guarded, verbose=2)
    check_same(expected, received)
    told = [record for record in caplog.records if "failed" in record.message]
    assert [record.message for record in told] == [
        f"oomproof: {helper} failed; training goes on without it (RuntimeError: out of order)."
    ]
    assert told[0].levelname == "WARNING"
