"""Numbers as people read them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepep_bootstrap.core.text import round_number, three_digits


@pytest.mark.parametrize(
    ("value", "text", "rounded"),
    [
        (0.0, "0", "0"),
        (0.00118, "0.00118", "0.00118"),
        (0.03, "0.0300", "0.03"),
        (9.999, "10.0", "10"),
        (52.13, "52.1", "52.1"),
        (400.0, "400", "400"),
        (1636.52, "1637", "1637"),
        (23745.39, "23745", "23745"),
        (float("inf"), "inf", "inf"),
    ],
)
def test_three_digits(value: float, text: str, rounded: str) -> None:
    assert (three_digits(value), round_number(value)) == (text, rounded)


@given(st.floats(1e-9, 1e12))
def test_they_say_the_number(value: float) -> None:
    for text in (three_digits(value), round_number(value)):
        assert "e" not in text
        assert float(text) == pytest.approx(value, rel=0.006)
