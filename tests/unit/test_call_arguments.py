"""Arguments are passed on as they were given: by place or by name."""

import functools

import pytest

from oomproof._training.call_arguments import CallArguments


def fit(x=None, y=None, batch_size=None, callbacks=None):
    return x, y, batch_size, callbacks


@functools.wraps(fit)
def adds_a_callback(*args, **kwargs):
    """What MLflow's autologging does to `fit`."""
    return fit(*args, **{**kwargs, "callbacks": [*(kwargs.get("callbacks") or []), "logger"]})


def of_a_task(x=None, y=None, **rest):
    return fit(x, y, **rest)


def test_a_tool_that_adds_an_argument_finds_it_free():
    arguments = CallArguments(adds_a_callback, (1,), {"batch_size": 5})
    arguments["callbacks"] = ["ours"]
    assert arguments.passed_to(adds_a_callback) == (1, None, 5, ["ours", "logger"])


def test_what_is_given_by_place_may_be_changed_and_left_out():
    arguments = CallArguments(fit, (1, 2, 3), {})
    arguments["x"] = "stream"
    del arguments["y"]
    assert arguments.passed_to(fit) == ("stream", None, 3, None)


@pytest.mark.parametrize(("method", "expected"), [(fit, True), (of_a_task, True), (lambda x, y: None, False)])
def test_whether_a_method_takes_an_argument(method, expected):
    assert CallArguments(method, (1, 2), {}).may_have("callbacks") is expected


def test_more_by_place_than_there_are_names():
    arguments = CallArguments(lambda x, *more: (x, more), (1, 2, 3), {})
    assert dict(arguments) == {"x": 1}
    assert arguments.passed_to(lambda x, *more: (x, more)) == (1, (2, 3))


def test_arguments_that_the_method_does_not_take():
    with pytest.raises(TypeError, match="unexpected keyword argument 'epoch'"):
        CallArguments(fit, (), {"epoch": 3})
