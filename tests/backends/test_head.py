"""The head of a model, its loss and its metrics in parts: the same training as plain Keras's, in less memory."""

import pytest
from head_models import HEADS
from here import SLOW_COMPILES, USUAL, crossed, modes
from recompute_models import check_same, trained

_plain = {}


def nothing(model):
    return ()


def plain(name, mode=USUAL, pieces=None):
    """Training without parts, once for all ways to cut a head."""
    if (name, mode, pieces) not in _plain:
        build, data, _ = HEADS[name]
        segments = None if pieces is None else nothing
        _plain[name, mode, pieces] = trained(build, data, mode, segments, pieces or 1)
    return _plain[name, mode, pieces]


def in_parts(name, parts, mode=USUAL, segments=nothing, pieces=1):
    build, data, label = HEADS[name]
    return trained(build, data, mode, segments, pieces, head=(label, parts))


@pytest.mark.parametrize(("name", "parts"), crossed(HEADS, [2, 3, 9]))
def test_the_same_training(float64, name, parts):
    check_same(plain(name), in_parts(name, parts), 1e-10)


@pytest.mark.parametrize(
    ("name", "mode"),
    crossed(["transformer", "several"], modes(*(["graph"] if SLOW_COMPILES else ["graph", "eager", "xla"]))),
)
def test_the_same_training_in_every_mode(float64, name, mode):
    check_same(plain(name, mode), in_parts(name, 3, mode), 1e-10)


@pytest.mark.parametrize(("name", "mode"), crossed(["transformer", "several", "residual"], modes("graph", "eager")))
def test_together_with_pieces(float64, name, mode):
    check_same(plain(name, mode, pieces=2), in_parts(name, 2, mode, pieces=2), 1e-10)


def test_together_with_recomputation(float64):
    segments = ("norm_0..add_0", "relu_1")
    check_same(plain("residual"), in_parts("residual", 3, segments=lambda model: segments), 1e-10)
