"""What counts as rounding, and what does not."""

from __future__ import annotations

import numpy as np
import pytest

from oomproof._backends.common import proof
from oomproof._records.exactness import Exactness, worse

FLOAT = float(np.finfo("float32").eps)
DOUBLE = float(np.finfo("float64").eps)
RNG = np.random.default_rng(0)
WEIGHT, GRADIENT = RNG.normal(size=(8, 4)), RNG.normal(size=(8, 4))


def outcome(gradient=GRADIENT, rate=0.1, **others):
    return {"gradient of w": gradient, "w": WEIGHT - rate * gradient, "seed": np.array([1, 2]), **others}


def found(made, asked=None, reordered=None, epsilon=DOUBLE):
    asked = outcome() if asked is None else asked
    return proof.disagreements(asked, made, [] if reordered is None else [reordered], {"w": WEIGHT}, epsilon)


def test_the_same_is_the_same():
    assert found(outcome()) == ()


@pytest.mark.parametrize("epsilon", [DOUBLE, FLOAT])
def test_rounding_is_rounding(epsilon):
    assert found(outcome(GRADIENT * (1 + epsilon)), epsilon=epsilon) == ()


@pytest.mark.parametrize("epsilon", [DOUBLE, FLOAT, proof.TENSOR_FLOAT])
@pytest.mark.parametrize("factor", [0.95, 1.05, 2.0, 1 / 3])
def test_another_share_is_not(epsilon, factor):
    wrong = found(outcome(GRADIENT * factor), epsilon=epsilon)
    assert wrong[0].name == "gradient of w"
    assert wrong[0].relative == pytest.approx(abs(factor - 1), rel=0.01)


def test_what_another_order_shows_is_measured():
    noisy = GRADIENT * (1 + 1e-6)
    assert found(outcome(noisy)) != ()
    assert found(outcome(noisy), reordered=outcome(GRADIENT * (1 - 1e-6))) == ()


def test_an_update_of_its_own_is_seen_though_gradients_agree():
    wrong = found(outcome(rate=0.11))
    assert [each.name for each in wrong] == ["w"]


def test_seeds_have_to_be_the_same():
    assert [each.name for each in found(outcome(seed=np.array([1, 3])))] == ["seed"]


def test_what_is_not_written_stays_as_it_was():
    assert found({**outcome(), "w": WEIGHT}, asked={"gradient of w": GRADIENT, "seed": np.array([1, 2])}) == ()
    missing = {name: value for name, value in outcome().items() if name != "w"}
    assert [each.name for each in found(missing)] == ["w"]


def test_gradients_of_nothing_but_rounding_are_held_to_the_largest():
    """Adam makes whole steps of them, so what follows is no evidence either."""
    tiny = RNG.normal(size=3) * 1e-9
    asked = outcome(**{"gradient of a/b": tiny, "a/b": tiny, "adam/a_b_momentum": tiny})
    made = outcome(**{"gradient of a/b": -tiny, "a/b": tiny + 1e-3, "adam/a_b_momentum": -tiny})
    assert found(made, asked, epsilon=FLOAT) == ()
    assert found({**made, "gradient of a/b": tiny + 1.0}, asked, epsilon=FLOAT) != ()


def signs(gradient, **others):
    """What Adam makes of a gradient in its first step."""
    return outcome(gradient, **others) | {"w": WEIGHT - 0.1 * np.sign(gradient), "adam/w_momentum": 0.1 * gradient}


def test_the_sign_of_a_number_that_is_rounding_is_not_held_against_a_step():
    gradient = np.where(np.arange(32).reshape(8, 4) == 5, 1e-5, GRADIENT)
    reordered = gradient + 1e-5 * RNG.normal(size=(8, 4))
    made = np.where(gradient == 1e-5, -1e-5, gradient)
    assert found(signs(made), signs(gradient), signs(reordered), epsilon=FLOAT) == ()
    # Not so with that of another.
    made = np.where(np.arange(32).reshape(8, 4) == 6, -gradient, gradient)
    assert found(signs(gradient) | {"w": signs(made)["w"]}, signs(gradient), signs(reordered), epsilon=FLOAT) != ()


def test_so_are_a_few_others_where_there_is_much_rounding():
    gradient = RNG.normal(size=(100, 100))
    weight = np.zeros((100, 100))
    reordered = gradient + 0.05 * RNG.normal(size=(100, 100))

    def step(gradient, flipped=0):
        signs = np.sign(gradient)
        signs[0, :flipped] *= -1
        return {"gradient of w": gradient, "w": weight - 0.1 * signs}

    def wrong(flipped, other):
        return proof.disagreements(step(gradient), step(gradient, flipped), [step(other)], {"w": weight}, FLOAT)

    assert wrong(20, reordered) == ()
    assert wrong(100, reordered) != ()
    assert wrong(1, gradient) != ()


def test_rows_that_no_sample_uses_are_compared():
    gradient = GRADIENT.copy()
    gradient[3] = 0.0
    moved = signs(gradient)["w"].copy()
    moved[3] += 0.1
    assert [each.name for each in found(signs(gradient) | {"w": moved}, signs(gradient), epsilon=FLOAT)] == ["w"]


def test_slots_are_told_apart_by_the_whole_name_of_their_variable():
    tiny = RNG.normal(size=3) * 1e-9
    asked = outcome(**{"gradient of b": tiny, "adam/a_b_momentum": tiny, "gradient of a/b": GRADIENT[0, :3]})
    made = asked | {"adam/a_b_momentum": tiny + 1.0}
    assert [each.name for each in found(made, asked, epsilon=FLOAT)] == ["adam/a_b_momentum"]


def test_slots_belong_to_whom_the_optimizer_keeps_them_for():
    """Adafactor names all of them alike. Some have fewer dimensions than their variable."""
    tiny = RNG.normal(size=(2, 3)) * 1e-9
    asked = outcome(**{"gradient of b": tiny, "slot (7)": tiny, "slot (8)": tiny[0]})
    made = asked | {"gradient of b": -tiny, "slot (7)": -tiny, "slot (8)": -tiny[0]}
    owners = {"slot (7)": "b", "slot (8)": "b"}
    assert proof.disagreements(asked, made, (), {}, FLOAT, owners) == ()
    assert len(proof.disagreements(asked, made, (), {}, FLOAT, {"slot (7)": "w"})) == 2


def test_what_optimizers_make_of_gradients_that_are_apart_is_no_more_apart_than_they_are():
    def squared(gradient):
        return {"gradient of w": gradient, "adam/w_velocity": gradient**2}

    def wrong(made, reordered):
        before = {"adam/w_velocity": np.zeros((8, 4))}
        return proof.disagreements(squared(GRADIENT), made, [squared(reordered)], before, FLOAT)

    near = GRADIENT * (1 + 5e-3)
    assert wrong(squared(near), GRADIENT * (1 + 1e-3)) == ()
    made = squared(near) | {"adam/w_velocity": 1.05 * GRADIENT**2}
    assert [each.name for each in wrong(made, GRADIENT * (1 + 1e-3))] == ["adam/w_velocity"]


def test_outcomes_are_brought_nearer_but_for_what_is_no_number():
    asked = {"a": np.array([1.0, np.inf]), "seed": np.array([1, 2]), "gone": None}
    near = proof.nearer(asked, {"a": np.array([2.0, np.inf]), "seed": np.array([1, 3]), "gone": None})
    assert 1.0 < near["a"][0] < 2.0
    assert not np.isfinite(near["a"][1])
    assert list(near["seed"]) == [1, 3]
    assert near["gone"] is None


def test_numbers_that_are_none_have_to_be_in_the_same_places():
    asked, made = outcome(loss=np.array([np.nan, 1.0])), outcome(loss=np.array([1.0, np.nan]))
    assert found(asked, asked) == ()
    assert [each.name for each in found(made, asked)] == ["loss"]


def test_gradients_that_overflow_hide_no_others():
    """As in the first steps of mixed precision, before the loss scale has come down."""
    overflown = np.array([np.inf, 1.0, np.nan])
    asked = outcome(**{"gradient of b": overflown})
    assert found(asked, asked, epsilon=FLOAT) == ()
    rounded = outcome(GRADIENT * (1 + FLOAT), **{"gradient of b": overflown})
    assert found(rounded, asked, epsilon=FLOAT) == ()
    assert [each.name for each in found(asked | {"gradient of w": GRADIENT * 1.1}, asked, epsilon=FLOAT)] == [
        "gradient of w"
    ]


def test_samples_are_taken_from_all_over():
    assert proof.spread(100, 5) == [0, 20, 40, 60, 80]
    assert proof.spread(3, 5) == [0, 1, 2]
    for samples in (2, 3, 5):
        assert sorted(proof.other_order(samples)) == list(range(samples)) != proof.other_order(samples)


def test_the_worst_of_two():
    random, not_exact = Exactness("exact but for random numbers", ("a",)), Exactness("not exact", ("b",))
    assert worse(Exactness(), random) == random
    assert worse(random, not_exact) == not_exact
    assert worse(not_exact, Exactness("not exact", ("c",))).why == ("b", "c")
    assert str(not_exact) == "not exact: b"
    assert not not_exact.holds
    assert random.holds
