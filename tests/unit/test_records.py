from __future__ import annotations

import dataclasses
import json
import pathlib

import pytest

from oomproof._records.diagnosis import Checkup, Finding, short_of
from oomproof._records.estimate import Estimate
from oomproof._records.exactness import Exactness
from oomproof._records.plan import Alternative, Plan
from oomproof._records.record import Record
from oomproof._records.run import Device, Event, Run
from oomproof._records.verification import Difference, Verification
from oomproof.data.audit_record import DataAudit, Stage
from oomproof.data.tuning import Tuning

GOLDEN = pathlib.Path(__file__).parent / "golden"
GIB = 2**30

DEVICE = Device("GPU:0", limit=16 * GIB, measurable=True)
OOM = Event(
    kind="oom",
    phase="train",
    epoch=1,
    step=17,
    batch_size=1024,
    before=1024,
    after=128,
    needed=9 * GIB,
    free=2 * GIB,
    seconds=10.4,
    message="batch 1024 now runs as 8 × 128: needed 9.0 GiB, 2.0 GiB free; step 17, nothing lost",
)
RUN = Run(
    backend="tensorflow",
    versions={"oomproof": "0.1.0", "keras": "3.15.1", "tensorflow": "2.21.0"},
    device=DEVICE,
    budget=8 * GIB,
    plan=Plan(micro_batch_size=128, lean_commit=True, caveats=("BatchNormalization 'bn' sees 128 samples, not 1024",)),
    steps={"train": 40, "test": 4, "predict": 0},
    peak=7 * GIB,
    seconds=61.25,
    events=(OOM,),
    host_peak=3 * GIB,
)
PLAIN_RUN = Run(
    backend="tensorflow",
    versions={},
    device=Device("CPU:0", limit=None, measurable=False),
    budget=None,
    plan=Plan(),
    steps={"train": 0},
    peak=None,
    seconds=0.0,
)
EXACT = Verification(
    exactness=Exactness(),
    batch_size=32,
    micro_batch_size=8,
    tolerance=1e-5,
    loss=1.2e-8,
    differences=(Difference("dense/kernel", 3e-9, 2e-8), Difference("dense/bias", 0.0, 0.0)),
    notes=("Dropout draws other masks",),
)
NOT_EXACT = Verification(
    exactness=Exactness("not exact", ("BatchNormalization 'bn'",)),
    batch_size=32,
    micro_batch_size=8,
    tolerance=1e-5,
    loss=0.02,
    differences=tuple(Difference(f"block/layer_{i}/kernel", 0.1 / (i + 1), 0.5 / (i + 1)) for i in range(12)),
    culprits=("BatchNormalization 'bn'",),
)
FITS = Estimate(
    model="resnet50",
    backend="tensorflow",
    mode="graph",
    phase="train",
    precision="mixed_bfloat16",
    batch_size=1024,
    micro_batch_size=128,
    engine="trace",
    low=9 * GIB,
    expected=10 * GIB,
    high=11 * GIB,
    confidence=0.98,
    gpu="rtx-4090 (23.6 GiB)",
    limit=21 * GIB,
    driver=23 * GIB,
    by_category={"activations": 6 * GIB, "weights": 3 * GIB, "temporary": GIB},
    by_layer=(*((f"block_{i}/conv", GIB - 2**26 * i) for i in range(12)), ("", 2**28)),
    peak_at="backward pass of block_3/conv",
    timeline=(3 * GIB, 10 * GIB, 4 * GIB),
    seconds=3.21,
    notes=("the model is not compiled: Adam was assumed",),
)
MAY_NOT_FIT = dataclasses.replace(
    FITS, limit=10 * GIB, micro_batch_size=None, confidence=None, by_layer=FITS.by_layer[:2]
)
DOES_NOT_FIT = dataclasses.replace(MAY_NOT_FIT, limit=GIB, phase="predict", notes=())
NO_CARD = dataclasses.replace(DOES_NOT_FIT, gpu=None, limit=None, driver=None, phase="test")
LONG_NAMES = dataclasses.replace(NO_CARD, by_layer=(("encoder/" * 9 + "attention/query", GIB), ("head", GIB)))
DIAGNOSED = Checkup((Finding("warning", "devices", "No room.", "nvidia-smi"), Finding("ok", "versions", "Fine.")))
TUNED = Tuning(
    budget=GIB,
    before=DataAudit("tf.data", (Stage("map", None), Stage("cache", 2 * GIB)), 2 * GIB, 0, findings=DIAGNOSED.findings),
    after=DataAudit("tf.data", (Stage("cache", 0),), 0, 0),
    changes=("cache: into a file",),
)
PLANNED = dataclasses.replace(
    RUN,
    plan=Plan(
        recompute=("a..b",), alternatives=(Alternative("whole", 7, 1.0, None, True, "fits"),), exactness=EXACT.exactness
    ),
)
ALL = (
    RUN,
    PLAIN_RUN,
    PLANNED,
    RUN.plan,
    DEVICE,
    OOM,
    EXACT,
    NOT_EXACT,
    FITS,
    NO_CARD,
    DIAGNOSED,
    TUNED,
    TUNED.before,
    short_of(9, 8, "too little", "buy more"),
)
PRINTED = {
    "estimate_fits": FITS,
    "estimate_long_names": LONG_NAMES,
    "estimate_may_not_fit": MAY_NOT_FIT,
    "estimate_does_not_fit": DOES_NOT_FIT,
    "estimate_no_card": NO_CARD,
    "run": RUN,
    "run_plain": PLAIN_RUN,
    "verification_exact": EXACT,
    "verification_not_exact": NOT_EXACT,
}


@pytest.mark.parametrize("record", ALL, ids=lambda record: type(record).__name__)
def test_a_record_goes_to_a_dict_json_and_a_file_and_back(record: Record, tmp_path: pathlib.Path) -> None:
    kind = type(record)
    assert json.loads(record.to_json()) == record.to_dict()
    assert kind.from_dict(record.to_dict()) == record
    assert kind.from_json(record.to_json()) == record
    record.save(tmp_path / "record.json")
    found = kind.load(str(tmp_path / "record.json"))
    assert found == record


def test_what_follows_from_the_fields_is_written_too() -> None:
    assert {"fits", "framework"} <= set(FITS.to_dict())
    assert EXACT.to_dict()["exact"] is True
    assert DIAGNOSED.to_dict()["worst"] == "warning"
    assert TUNED.to_dict()["before"]["unknown"] == ["map"]


def test_a_record_of_an_older_version_is_read() -> None:
    old = RUN.to_dict() | {"exactness": None}
    del old["host_peak"], old["plan"]["alternatives"], old["plan"]["exactness"]
    found = Run.from_dict(old)
    assert found.exactness == Exactness()
    assert found.host_peak is None
    assert found.plan == dataclasses.replace(RUN.plan, alternatives=(), exactness=None)


def test_nothing_is_exact_because_nothing_is_said() -> None:
    with pytest.raises(KeyError):
        Plan.from_dict({"exactness": {}})


def test_a_field_that_nobody_knows_is_an_error() -> None:
    with pytest.raises(TypeError, match="offload"):
        Plan.from_dict(Plan().to_dict() | {"offload": True})


def test_ooms_counts_failed_attempts_only() -> None:
    kinds = ("plan", "oom", "shrink", "grow", "commit-oom", "note")
    events = tuple(dataclasses.replace(OOM, kind=kind) for kind in kinds)
    assert dataclasses.replace(RUN, events=events).ooms == 2


def test_verification_is_true_when_exact() -> None:
    assert EXACT
    assert not NOT_EXACT


@pytest.mark.parametrize(
    ("estimate", "fits"), [(FITS, True), (MAY_NOT_FIT, False), (DOES_NOT_FIT, False), (NO_CARD, None)]
)
def test_an_estimate_says_whether_it_fits(estimate: Estimate, fits: bool | None) -> None:
    assert estimate.fits is fits
    assert estimate.to_dict()["fits"] is fits


@pytest.mark.parametrize("name", PRINTED)
def test_text(name: str) -> None:
    assert f"{PRINTED[name]}\n" == (GOLDEN / f"{name}.txt").read_text()


@pytest.mark.parametrize("record", [DEVICE, OOM, RUN, RUN.plan, EXACT, FITS])
def test_records_are_frozen(record: object) -> None:
    field = dataclasses.fields(record)[0].name  # type: ignore[arg-type]
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(record, field, None)
