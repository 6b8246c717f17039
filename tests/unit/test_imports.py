"""The import rule of docs/architecture.md, read from the source, and what `import oomproof` may load."""

from __future__ import annotations

import ast
import pathlib
import re
import subprocess
import sys

import pytest

SOURCE = pathlib.Path(__file__).parents[2] / "src"
FRAMEWORKS = {"tensorflow", "jax", "torch"}

FOUNDATION = {"errors", "units", "exactness", "records", "findings", "tracing", "host", "naming", "_version"}
LEAF_ROOMS = {"estimation", "profiling", "data", "parallel"}
PURE_ROOMS = {"planning", "step.recover", "step.remat", "diagnosis", "reporting"}
BELOW_TRAINING = (
    FOUNDATION
    | LEAF_ROOMS
    | PURE_ROOMS
    | {
        "devices",
        "step",
        "backends",
        "batches",
        "driver",
        "drivers",
        "gauge",
        "journal",
        "probing",
        "proof",
        "proving",
        "refusals",
        "verification",
        "verification_record",
        "loops",
    }
    | {"doctor"}
    | {"plan_cache", "plan_looks", "plans", "proof_cache"}
)

# Which of our rooms a room may import, besides itself. A room is a module or a package of src/oomproof; where two
# names fit, the longer one counts. The demo is shown by the command line and used by nothing else.
MAY_IMPORT = {
    "_version": set(),
    "errors": set(),
    "units": set(),
    "host": set(),
    # Imports what a user names, whatever that is.
    "naming": set(),
    "exactness": set(),
    "records": {"units", "exactness"},
    "verification_record": {"exactness"},
    # Compares what steps write, whoever made them.
    "proof": set(),
    "findings": {"units"},
    "tracing": {"records"},
    "planning": FOUNDATION | {"step", "step.remat"},
    "step.recover": FOUNDATION,
    "step.remat": FOUNDATION,
    "diagnosis": FOUNDATION,
    "reporting": FOUNDATION,
    "devices": FOUNDATION | {"backends"},
    "step": FOUNDATION | {"step.recover"},
    "backends": FOUNDATION | {"proof", "step"},
    # A step and a device for tests, in the terms of the rooms they stand in for.
    "backends.fake": FOUNDATION | {"backends", "step"},
    "journal": FOUNDATION,
    "refusals": FOUNDATION | {"diagnosis"},
    # Looks at the machine, and no framework is asked.
    "doctor": FOUNDATION | {"devices"},
    **{room: FOUNDATION | LEAF_ROOMS | {"devices", "step", "backends"} for room in LEAF_ROOMS},
    "batches": FOUNDATION | {"step", "step.recover"},
    "gauge": FOUNDATION | {"step", "step.recover", "backends", "refusals"},
    "probing": FOUNDATION | {"step", "step.recover", "backends", "batches", "gauge", "journal"},
    "driver": FOUNDATION
    | {"step", "step.recover", "backends", "batches", "gauge", "journal", "probing", "proving", "refusals"},
    "drivers": FOUNDATION | {"backends", "batches", "driver", "journal"},
    "proving": FOUNDATION | {"backends", "batches", "step"},
    "plan_cache": FOUNDATION | {"backends"},
    "proof_cache": FOUNDATION | {"backends", "plan_cache"},
    "plan_looks": FOUNDATION | {"estimation"},
    "plans": FOUNDATION | {"devices", "backends", "estimation", "planning", "plan_cache", "plan_looks"},
    "verification": BELOW_TRAINING,
    "loops": BELOW_TRAINING,
    "training": BELOW_TRAINING,
    "": BELOW_TRAINING | {"training"},
    "demo": BELOW_TRAINING | {"training", ""},
    "cli": BELOW_TRAINING | {"training", "demo", ""},
}
# Only these rooms may name a framework; Keras is free for all of them but the foundation and the pure rooms.
MAY_IMPORT_FRAMEWORKS = {"backends", "demo"}
# A tf.data pipeline is TensorFlow's and a DataLoader torch's, whatever Keras's backend: in the data room a file that is
# named for a framework may import that one, inside of a function, since whoever hands such data in has it installed.
DATA_FILES = re.compile(r"oomproof\.data\.(?:\w+_)?(tf|torch)(?:_\w+)?")
FRAMEWORK_OF_FILE = {"tf": "tensorflow", "torch": "torch"}
MAY_NOT_IMPORT_KERAS = FOUNDATION | PURE_ROOMS | {""}

FILES = sorted((SOURCE / "oomproof").rglob("*.py"))


def room_of(module: str) -> str:
    """`"oomproof.step.recover"` → `"step.recover"`, `"oomproof.backends.tensorflow.step"` → `"backends"`."""
    inside = module.split(".")[1:]
    for length in range(len(inside), 0, -1):
        if (name := ".".join(inside[:length])) in MAY_IMPORT:
            return name
    return ".".join(inside[:1])


def module_of(file: pathlib.Path) -> str:
    return ".".join(file.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__")


def imported_modules(source: str) -> set[str]:
    """Every module named by an import, wherever it stands, except for those that only type checkers see."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            node.body = []
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute here"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


@pytest.mark.parametrize("file", FILES, ids=module_of)
def test_import_rule(file: pathlib.Path) -> None:
    room = room_of(module_of(file))
    assert room in MAY_IMPORT, f"{file.name} is in no room of docs/architecture.md"
    modules = imported_modules(file.read_text())
    ours = {room_of(module) if is_a_room(module) else "" for module in modules if module.split(".")[0] == "oomproof"}
    assert ours - {room} <= MAY_IMPORT[room]
    foreign = {module.split(".")[0] for module in modules}
    if room not in MAY_IMPORT_FRAMEWORKS:
        named_for = DATA_FILES.fullmatch(module_of(file))
        assert foreign & FRAMEWORKS <= ({FRAMEWORK_OF_FILE[named_for[1]]} if named_for else set())
    if room in MAY_NOT_IMPORT_KERAS:
        assert "keras" not in foreign


def is_a_room(module: str) -> bool:
    """Tells `oomproof.units` from a public name such as `oomproof.guard`."""
    return room_of(module) in MAY_IMPORT


def test_the_rule_can_fail() -> None:
    source = "from oomproof import training\nimport tensorflow as tf\nfrom oomproof.step.recover import smaller"
    modules = imported_modules(source)
    assert {room_of(module) for module in modules if module.startswith("oomproof")} == {"training", "step.recover"}
    assert "training" not in MAY_IMPORT["backends"]
    assert "tensorflow" in modules


def test_type_checking_imports_do_not_count() -> None:
    assert imported_modules("if TYPE_CHECKING:\n    from oomproof.training import fit\nimport json") == {"json"}


def test_import_loads_no_framework() -> None:
    code = "import sys, oomproof; print(*{'tensorflow', 'keras', 'jax', 'torch'}.intersection(sys.modules))"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert answer.stdout.strip() == ""
