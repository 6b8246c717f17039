from __future__ import annotations

import errno
import json
import pathlib
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
from typer.testing import CliRunner

from oomproof._cli import main as cli
from oomproof._demo import processes, run
from oomproof._demo.processes import Outcome
from oomproof._records.units import format_bytes, parse_budget
from oomproof._version import __version__
from oomproof.errors import BackendError, CannotFitError, RecoveryFailedError

MIB = 2**20


def invoke(*arguments: str) -> Any:
    return CliRunner().invoke(cli.app, list(arguments), env={"COLUMNS": "120", "TERM": "dumb", "NO_COLOR": "1"})


def call_main(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["oomproof", *arguments])
    with pytest.raises(SystemExit) as left:
        cli.main()
    return int(left.value.code or 0)


def result(**changes: Any) -> dict[str, Any]:
    """What a process of the demo reports: 24 batches of 256, three epochs, everything fine."""
    fine = {
        "finished": True,
        "error": None,
        "message": None,
        "seen_least": 3,
        "seen_most": 3,
        "fits": [{"batch_size": 256, "batches": 24}],
        "iterations": 24,
        "accuracy": 0.5,
        "peak": 500 * MIB,
        "seconds": 12.0,
        "run": None,
    }
    return fine | changes


def outcomes() -> dict[str, Outcome]:
    oom = "Graph execution error:\n\nOOM when allocating tensor with shape[256,1024,24]"
    fits = [{"batch_size": 256, "batches": 4}, {"batch_size": 128, "batches": 9}, {"batch_size": 64, "batches": 96}]
    guarded = {
        "plan": {"micro_batch_size": 64},
        "events": [{"kind": "oom", "after": 128}, {"kind": "shrink", "after": 48}],
    }
    plain = result(
        finished=False,
        error="ResourceExhaustedError",
        message=oom,
        seen_least=0,
        seen_most=1,
        fits=fits[:1],
        iterations=5,
    )
    halving = result(seen_most=5, fits=fits, iterations=111)
    return {
        "unlimited": Outcome("unlimited", True, result(), apart=0.0),
        "plain": Outcome("plain", True, plain),
        "halving": Outcome("halving", True, halving, apart=0.12),
        "oomproof": Outcome("oomproof", True, result(run=guarded), apart=1.2e-6),
    }


def test_help_and_version() -> None:
    assert "demo" in invoke("--help").output
    assert "--limit" in invoke("demo", "--help").output
    assert invoke("--version").output.strip() == f"oomproof {__version__}"


@pytest.mark.parametrize("limit", ["8 bananas", "0", "-5MB", "90%", "150%", "12", "", "nan"])
def test_bad_limit_is_a_usage_error(limit: str) -> None:
    outcome = invoke("demo", "--limit", limit)
    assert outcome.exit_code == 2
    assert "--limit" in outcome.output
    assert repr(limit) in outcome.output
    assert "Traceback" not in outcome.output


@pytest.mark.parametrize(
    "arguments",
    [
        ("demo", "--batch-size", "0"),
        ("demo", "--json", "/no/such/folder/x.json"),
        ("demo", "--nonsense"),
        ("nonsense",),
    ],
)
def test_other_usage_errors(arguments: tuple[str, ...]) -> None:
    assert invoke(*arguments).exit_code == 2


def raising(error: Exception) -> Callable[..., Any]:
    def fail(*_: Any) -> Any:
        raise error

    return fail


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (CannotFitError("needs [b]9 GiB[/b]"), 3),
        (RecoveryFailedError("needs 9 GiB"), 1),
        (BackendError("no TensorFlow"), 2),
        (OSError(errno.ENOSPC, "No space left on device"), 2),
    ],
)
def test_what_a_user_can_put_right_is_one_message(
    error: Exception, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run, "run", raising(error))
    assert call_main(monkeypatch, "demo") == code
    assert capsys.readouterr().err == f"oomproof: {error}\n"


def test_an_argument_that_is_refused_is_one_message(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run, "run", lambda *_: parse_budget("8 bananas", None))
    assert call_main(monkeypatch, "demo") == 2
    assert "Received: budget='8 bananas'" in capsys.readouterr().err


def test_a_backend_that_is_not_installed_is_one_message(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run, "run", raising(ModuleNotFoundError("No module named 'jax'", name="jax")))
    assert call_main(monkeypatch, "demo") == 2
    assert "pip install 'oomproof[jax]'" in capsys.readouterr().err


def test_a_step_of_the_user_that_fails_is_one_message(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    error = ValueError("shapes differ")
    error.add_note("A step of model was tried with x (4, 16) float32.")
    error.add_note("Some other note.")
    monkeypatch.setattr(run, "run", raising(error))
    assert call_main(monkeypatch, "demo") == 2
    assert capsys.readouterr().err == "oomproof: shapes differ\nA step of model was tried with x (4, 16) float32.\n"


@pytest.mark.parametrize(
    "fails",
    [
        raising(ValueError("raised in somebody else's code")),
        raising(KeyError("name")),
        raising(OSError("not from the system")),
        raising(ModuleNotFoundError("No module named 'oomproof.gone'", name="oomproof.gone")),
        # A call of ours that fails, as it would by a mistake in here.
        lambda *_: format_bytes("9"),  # type: ignore[arg-type]
    ],
)
def test_any_other_error_keeps_its_traceback(
    fails: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run, "run", fails)
    monkeypatch.setattr(sys, "argv", ["oomproof", "demo"])
    with pytest.raises((ValueError, TypeError, KeyError, OSError, ModuleNotFoundError)):
        cli.main()
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("arguments", [("--traceback", "demo"), ("demo", "--traceback")])
def test_a_traceback_for_all(arguments: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "run", raising(CannotFitError("needs 9 GiB")))
    monkeypatch.setattr(sys, "argv", ["oomproof", *arguments])
    with pytest.raises(CannotFitError):
        cli.main()


def test_help_loads_nothing_slow() -> None:
    code = (
        "import sys\nfrom oomproof._cli.main import app\n"
        "try: app(['--help'])\nexcept SystemExit: pass\n"
        "print({'numpy', 'keras', 'rich.console', 'psutil'}.intersection(sys.modules))"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert answer.stdout.splitlines()[-1] == "set()"


def test_demo_prints_what_was_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    monkeypatch.setattr(processes, "compare", lambda limit_mib, batch_size: outcomes())
    shown = invoke("demo", "--json", str(tmp_path / "demo.json"))
    assert shown.exit_code == 0
    for text in (
        "except tf.errors.ResourceExhaustedError",
        "256 → 128 → 64",
        "3 to 5",
        "111, 2 not real",
        "1.2e-06",
        "plain fit stopped after 4 batches: ResourceExhaustedError: OOM when allocating tensor",
        "saw some clips 5 times instead of 3",
        "in pieces of down to 48 where memory was short",
        "guard     oomproof.guard(model)",
        "oomproof estimate keras.applications.VGG16",
    ):
        assert text in shown.output
    assert json.loads((tmp_path / "demo.json").read_text())["limit"] == 200 * MIB


def test_demo_where_everything_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    fitting = {name: Outcome(name, True, result(), apart=0.0) for name in outcomes()}
    monkeypatch.setattr(processes, "compare", lambda limit_mib, batch_size: fitting)
    shown = invoke("demo", "--limit", "4GiB")
    assert shown.exit_code == 0
    assert "Everything fitted" in shown.output


def test_demo_where_a_process_dies(monkeypatch: pytest.MonkeyPatch) -> None:
    dead = outcomes() | {
        "oomproof": Outcome("oomproof", True, None, end="killed", last_words="by SIGABRT. Check failed")
    }
    monkeypatch.setattr(processes, "compare", lambda limit_mib, batch_size: dead)
    shown = invoke("demo")
    assert shown.exit_code == 1
    assert "killed by SIGABRT. Check failed" in shown.output


def test_demo_with_too_little_for_tensorflow(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    dead = {name: Outcome(name, False, None, end="killed", last_words="by SIGABRT") for name in outcomes()}
    monkeypatch.setattr(
        processes, "compare", lambda limit_mib, batch_size: dead | {"unlimited": outcomes()["unlimited"]}
    )
    assert call_main(monkeypatch, "demo", "--limit", "1MiB") == 3
    assert "1 MiB is too little for TensorFlow" in capsys.readouterr().err
