"""Patches: entered, left, counted, and out of everybody else's way."""

from __future__ import annotations

import gc
import threading
import types
import weakref
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest

from oomproof._compat.patches import Patch, Redirect, Together, redirects


def module() -> Any:
    def plain(value: int) -> str:
        """What it says."""
        return f"plain {value}"

    return types.SimpleNamespace(function=plain)


def loud(original: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args: original(*args).upper()


def test_the_last_to_leave_puts_back_what_was_there() -> None:
    owner = module()
    original, patch = owner.function, Patch(owner, "function", loud)
    with patch:
        with patch:
            assert owner.function(1) == "PLAIN 1"
        assert owner.function(1) == "PLAIN 1"
    assert owner.function is original


def test_what_replaces_is_made_once() -> None:
    owner = module()
    patch, seen = Patch(owner, "function", loud), []
    for _ in range(2):
        with patch:
            seen.append(owner.function)
    assert seen[0] is seen[1]


def test_leaves_a_patch_of_somebody_else_alone() -> None:
    owner = module()
    redirect = Redirect(owner, "function")
    with redirect.to(lambda original, value: "ours"):
        theirs = loud(owner.function)
        owner.function = theirs
        assert owner.function(1) == "OURS"
    assert owner.function is theirs
    assert owner.function(1) == "PLAIN 1"
    with redirect.to(lambda original, value: "ours"):
        assert owner.function(1) == "ours"
    assert owner.function is theirs


def test_is_gone_though_somebody_else_put_ours_back() -> None:
    owner = module()
    original, redirect = owner.function, Redirect(owner, "function")
    other = mock.patch.object(owner, "function", loud(original))
    with redirect.to(lambda original, value: "ours"):
        other.start()
    other.stop()
    assert owner.function(1) == "plain 1"
    with redirect.to(lambda original, value: "ours"):
        assert owner.function(1) == "ours"
    assert owner.function is original


def test_what_others_restored_meanwhile_is_replaced_again() -> None:
    owner = module()
    original, redirect = owner.function, Redirect(owner, "function")
    with redirect.to(lambda original, value: "ours"):
        owner.function = original
    with redirect.to(lambda original, value: "ours"):
        assert owner.function(1) == "ours"
    assert owner.function is original


def test_another_thread_sees_the_original() -> None:
    owner = module()
    redirect = Redirect(owner, "function")
    seen: list[str] = []
    with redirect.to(lambda original, value: "ours"):
        other = threading.Thread(target=lambda: seen.append(owner.function(1)))
        other.start()
        other.join()
        assert owner.function(1) == "ours"
    assert seen == ["plain 1"]


def test_stays_for_a_thread_that_still_wants_it() -> None:
    owner = module()
    original, redirect = owner.function, Redirect(owner, "function")
    entered, leave, seen = threading.Event(), threading.Event(), []

    def other() -> None:
        with redirect.to(lambda original, value: "theirs"):
            entered.set()
            leave.wait(10)
            seen.append(owner.function(1))

    thread = threading.Thread(target=other)
    with redirect.to(lambda original, value: "ours"):
        thread.start()
        entered.wait(10)
    assert owner.function(1) == "plain 1"
    leave.set()
    thread.join()
    assert seen == ["theirs"]
    assert owner.function is original


def test_many_threads_at_once_leave_the_original() -> None:
    owner = module()
    original, redirect = owner.function, Redirect(owner, "function")
    wrong: list[str] = []

    def often(name: str) -> None:
        for _ in range(2000):
            with redirect.to(lambda original, value: name):
                if owner.function(1) != name:
                    wrong.append(name)
            if owner.function(1) != "plain 1":
                wrong.append(f"after {name}")

    threads = [threading.Thread(target=often, args=(str(number),)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert owner.function is original


def test_answers_nest_and_end_with_an_error() -> None:
    owner = module()
    original, redirect = owner.function, Redirect(owner, "function")
    with redirect.to(lambda original, value: "outer"):
        with pytest.raises(ValueError, match="inner"), redirect.to(lambda original, value: "inner"):
            raise ValueError(owner.function(1))
        assert owner.function(1) == "outer"
    assert owner.function is original


def test_a_property_of_a_class() -> None:
    class Owner:
        @property
        def place(self) -> str:
            return "here"

    before = vars(Owner)["place"]
    with Redirect(Owner, "place").to(lambda original, owner: original(owner) + " or there"):
        assert Owner().place == "here or there"
    assert vars(Owner)["place"] is before


def test_what_was_missing_is_missing_again() -> None:
    owner = module()
    with Redirect(owner, "other", create=True).to(lambda original, *args: original):
        assert owner.other(1) is None
    assert not hasattr(owner, "other")
    entries: dict[str, str] = {}
    with Patch(entries, "KEY", lambda original: "value", create=True):
        assert entries == {"KEY": "value"}
    assert not entries


def test_a_name_that_is_gone_is_said_at_once() -> None:
    with pytest.raises(AttributeError, match="'gone'"):
        Patch(module(), "gone", loud)
    assert redirects(module(), "gone") == {}


def test_together() -> None:
    owner, other = module(), module()
    before = owner.function, other.function
    with Together(Patch(owner, "function", loud), Patch(other, "function", loud)):
        assert (owner.function(1), other.function(2)) == ("PLAIN 1", "PLAIN 2")
    assert (owner.function, other.function) == before


def test_a_finaliser_may_give_up_in_the_middle_of_entering() -> None:
    """Python's collector runs when it likes, also in a thread that holds the lock."""
    owner = module()
    original = owner.function

    class Held:
        pass

    def make(original: Any) -> Any:
        held = Held()
        patch._enter()
        weakref.finalize(held, patch.give_up)
        del held
        gc.collect()
        return loud(original)

    patch = Patch(owner, "function", loud)
    with Patch(module(), "function", make):
        assert owner.function is not original or not patch._wanted
    assert owner.function is original
