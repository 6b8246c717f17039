"""The versions that were tested: the same in pyproject.toml, and refused outside of them."""

from __future__ import annotations

import pathlib
import re
import tomllib
import types
import warnings

import pytest

from oomproof._compat import versions
from oomproof.errors import BackendError

ROOT = pathlib.Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    versions._warn.cache_clear()
    monkeypatch.delenv(versions.UNCHECKED, raising=False)
    for package, (lowest, _) in versions.SUPPORTED.items():
        monkeypatch.setitem(versions.sys.modules, package, types.SimpleNamespace(__version__=f"{lowest}.7"))


def set_version(monkeypatch: pytest.MonkeyPatch, package: str, version: str) -> None:
    monkeypatch.setitem(versions.sys.modules, package, types.SimpleNamespace(__version__=version))


def test_pip_says_the_same_of_keras() -> None:
    lowest, untested = versions.SUPPORTED["keras"]
    assert f"keras>={lowest},<{untested}" in PROJECT["dependencies"]


@pytest.mark.parametrize("backend", ["tensorflow", "jax", "torch"])
def test_pip_says_the_same_of_backends(backend: str) -> None:
    lowest, untested = versions.SUPPORTED[backend]
    assert f"{backend}>={lowest},<{untested}" in PROJECT["optional-dependencies"][backend]


@pytest.mark.parametrize("file", ["constraints.txt", "constraints-oldest.txt"])
def test_what_is_tested_is_supported(file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pins = dict(re.findall(r"^(keras|tensorflow|jax|torch)==(\S+)$", (ROOT / file).read_text(), re.MULTILINE))
    assert pins.keys() == versions.SUPPORTED.keys()
    for package, version in pins.items():
        set_version(monkeypatch, package, version)
    assert [versions.problem_with(backend) for backend in ("tensorflow", "jax", "torch")] == [None] * 3


@pytest.mark.parametrize("version", ["3.16.0", "3.16.0.dev2026082103", "3.12.4", "4.0", "2.15.0"])
def test_a_version_outside_is_refused_in_one_sentence(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    set_version(monkeypatch, "keras", version)
    expected = re.escape(
        f"oomproof supports Keras from 3.13 to below 3.16, and {version} is installed: run `pip install "
        "'keras>=3.13,<3.16'`, or set OOMPROOF_UNCHECKED=1 to train with it all the same."
    )
    with pytest.raises(BackendError, match=f"^{expected}$"):
        versions.require("jax")


def test_the_backend_counts_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    set_version(monkeypatch, "torch", "2.15.0+cu130")
    versions.require("jax")
    with pytest.raises(BackendError, match=r"torch from .* 2\.15\.0\+cu130 is installed"):
        versions.require("torch")


@pytest.mark.parametrize("version", ["3.13.0", "3.15.1", "3.15.9.post1"])
def test_versions_inside_are_taken(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    set_version(monkeypatch, "keras", version)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        versions.require("tensorflow")
        versions.warn("tensorflow")


def test_unchecked_trains_with_one_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    set_version(monkeypatch, "keras", "3.16.0")
    monkeypatch.setenv(versions.UNCHECKED, "1")
    with pytest.warns(UserWarning, match=r"3\.16\.0 is installed.*Not refused, since OOMPROOF_UNCHECKED=1") as said:
        versions.require("torch")
    assert len(said) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        versions.require("torch")


def test_what_trains_nothing_warns(monkeypatch: pytest.MonkeyPatch) -> None:
    set_version(monkeypatch, "jax", "0.12.0")
    with pytest.warns(UserWarning, match=r"0\.12\.0 is installed"):
        versions.warn("jax")
