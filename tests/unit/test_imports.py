"""The import rule of docs/design/architecture.md, read from the source, and what `import oomproof` may load."""

from __future__ import annotations

import ast
import pathlib
import re
import subprocess
import sys

import pytest

SOURCE = pathlib.Path(__file__).parents[2] / "src"
FRAMEWORKS = {"tensorflow", "jax", "torch"}

# A room is a module or a package of src/oomproof. Each may import itself and the rooms named here.
MAY_IMPORT = {
    "_version": set(),
    "errors": set(),
    "_records": set(),
    "_machine": {"_records"},
    "_explain": {"_records"},
    # What nobody promised us, of Keras and the frameworks.
    "_compat": {"errors"},
    # Looks at a machine before a framework is imported.
    "_doctor": {"_records", "_machine"},
    "data": {"errors", "_records", "_machine", "_compat"},
    "_backends": {"_version", "errors", "_records", "_compat"},
    "_simulators": {"errors", "_records", "_compat", "_backends"},
    "_estimation": {"errors", "_records", "_machine", "_compat", "_backends", "_simulators"},
    "_planning": {"_version", "errors", "_records", "_machine", "_compat", "_backends", "_simulators", "_estimation"},
    "_training": {
        "_version",
        "errors",
        "_records",
        "_machine",
        "_compat",
        "_backends",
        "_planning",
        "_explain",
        "data",
    },
    # The public names, each loaded when it is first used.
    "": {"_version", "errors", "_records", "_estimation", "_planning", "_training", "_explain", "data"},
    "_demo": {"errors", "_records", ""},
    "_cli": {"_version", "errors", "_records", "_machine", "_estimation", "_planning", "_doctor", "_demo", "data", ""},
}
# Only these rooms may name a framework. All others get at it through the backend.
MAY_IMPORT_FRAMEWORKS = {"_compat", "_backends", "_simulators", "_demo"}
# These work without Keras, too.
MAY_NOT_IMPORT_KERAS = {"", "_version", "errors", "_records", "_machine", "_explain", "_doctor"}
# A tf.data pipeline is TensorFlow's and a DataLoader torch's, whatever Keras's backend: in the data room a file that is
# named for a framework may import that one, inside of a function, since whoever hands such data in has it installed.
DATA_FILES = re.compile(r"oomproof\.data\.(?:\w+\.)?(?:\w+_)?(tf|torch)(?:_\w+)?")
FRAMEWORK_OF_FILE = {"tf": "tensorflow", "torch": "torch"}

FILES = sorted((SOURCE / "oomproof").rglob("*.py"))


def room_of(module: str) -> str:
    """`"oomproof._training.driver"` → `"_training"`; what is no room, such as a public name, is the package itself."""
    name = module.split(".")[1] if "." in module else ""
    return name if name in MAY_IMPORT else ""


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
    name = module_of(file)
    room = room_of(name)
    assert room or name == "oomproof", f"{name} is in no room"
    modules = imported_modules(file.read_text())
    ours = {room_of(module) for module in modules if module.split(".")[0] == "oomproof"}
    assert ours - {room} <= MAY_IMPORT[room]
    foreign = {module.split(".")[0] for module in modules}
    if room not in MAY_IMPORT_FRAMEWORKS:
        named_for = DATA_FILES.fullmatch(name)
        assert foreign & FRAMEWORKS <= ({FRAMEWORK_OF_FILE[named_for[1]]} if named_for else set())
    if room in MAY_NOT_IMPORT_KERAS:
        assert "keras" not in foreign


def test_every_room_exists() -> None:
    there = {path.stem if path.suffix == ".py" else path.name for path in (SOURCE / "oomproof").iterdir()}
    assert set(MAY_IMPORT) - {""} == there - {"__init__", "__pycache__", "py.typed"}


def test_the_rule_can_fail() -> None:
    source = "from oomproof import _training\nimport tensorflow as tf\nfrom oomproof._planning.remat import solve"
    modules = imported_modules(source)
    assert {room_of(module) for module in modules if module.startswith("oomproof")} == {"_training", "_planning"}
    assert "_training" not in MAY_IMPORT["_backends"]
    assert "tensorflow" in modules


def test_type_checking_imports_do_not_count() -> None:
    assert imported_modules("if TYPE_CHECKING:\n    from oomproof._training.guard import fit\nimport json") == {"json"}


def test_import_loads_no_framework() -> None:
    code = "import sys, oomproof; print(*{'tensorflow', 'keras', 'jax', 'torch'}.intersection(sys.modules))"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert answer.stdout.strip() == ""
