"""Fixtures of the backend suites."""

import keras
import pytest


@pytest.fixture
def float64():
    """Double precision, so that what is not exact cannot hide behind rounding."""
    floatx, policy = keras.config.floatx(), keras.config.dtype_policy()
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    yield
    keras.config.set_floatx(floatx)
    keras.config.set_dtype_policy(policy)
