"""Least squares without negative coefficients, by the conditions of its optimum and by descent."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer_costmodel.nnls import nnls, solved

NUMBERS = st.floats(-5, 5).map(lambda x: round(x, 3))


@st.composite
def problems(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    count = draw(st.integers(1, 8))
    rows = np.array(draw(st.lists(st.lists(NUMBERS, min_size=count, max_size=count), min_size=1, max_size=8)))
    moment = np.array(draw(st.lists(NUMBERS, min_size=count, max_size=count)))
    return rows.T @ rows + 1e-3 * np.eye(count), moment


@given(problems())
def test_optimum(problem: tuple[np.ndarray, np.ndarray]) -> None:
    """Karush-Kuhn-Tucker: nothing is gained by moving, inside or along a bound."""
    gram, moment = problem
    x = np.array(nnls(gram.tolist(), moment.tolist()))
    gradient = gram @ x - moment
    tolerance = 1e-9 * (1 + np.abs(gram).max() * np.abs(x).max())
    assert (x >= 0).all()
    assert (gradient >= -tolerance).all()
    assert (np.abs(gradient * (x > 0)) <= tolerance).all()


@settings(max_examples=30)
@given(problems())
def test_coordinate_descent_finds_no_less(problem: tuple[np.ndarray, np.ndarray]) -> None:
    gram, moment = problem
    slow = np.zeros(len(moment))
    for _ in range(2000):
        for i in range(len(moment)):
            slow[i] = max(0.0, slow[i] - (gram[i] @ slow - moment[i]) / gram[i, i])
    x = np.array(nnls(gram.tolist(), moment.tolist()))
    value, slow_value = (0.5 * v @ gram @ v - moment @ v for v in (x, slow))
    assert value <= slow_value + 1e-9


def test_without_an_optimum_it_says_so() -> None:
    with pytest.raises(ZeroDivisionError):
        nnls([[1.0, 1.0], [1.0, 1.0]], [1.0, 0.0])


@given(problems())
def test_elimination_solves_as_numpy_does(problem: tuple[np.ndarray, np.ndarray]) -> None:
    gram, moment = problem
    np.testing.assert_allclose(
        solved(gram.tolist(), moment.tolist()), np.linalg.solve(gram, moment), rtol=1e-6, atol=1e-6
    )
