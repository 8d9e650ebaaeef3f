"""Expected lengths of answers."""

from deepinfer_router.expected_output import ExpectedOutput


def test_before_any_answer() -> None:
    expected = ExpectedOutput()
    assert [expected.estimate("m", "k", most) for most in (None, 1000, 1, 0)] == [256, 300, 1, 1]


def test_the_average_follows_and_max_tokens_bounds() -> None:
    expected = ExpectedOutput()
    expected.observe("m", "k", 100)
    assert expected.estimate("m", "k", None) == 100
    expected.observe("m", "k", 200)
    assert expected.estimate("m", "k", None) == 110
    assert expected.estimate("m", "k", 50) == 50
    assert expected.estimate("m", "other", None) == expected.estimate("other", "k", None) == 256
    for _ in range(200):
        expected.observe("m", "k", 0)
    assert expected.estimate("m", "k", None) == 1


def test_bounded() -> None:
    """production-stack#687: tables that clients could grow."""
    expected = ExpectedOutput(most=10)
    for number in range(1000):
        expected.observe("m", str(number % 10 if number < 500 else number), 7)
        expected.observe("m", "busy", 9)
    assert len(expected._means) == 10
    assert expected.estimate("m", "busy", None) == 9
