"""Answers found in replies: what is stated, where it stands, and strings that try to mislead."""

from __future__ import annotations

import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfer_vllm.evaluation.exact import normalised
from deepinfer_vllm.evaluation.final_answer import boxed, marked, without_reasoning
from deepinfer_vllm.evaluation.integers import NUMBER, canonical, stated
from deepinfer_vllm.evaluation.scoring import score
from deepinfer_vllm.evaluation.task import Item

OPTIONS = ("Paris", "Rome", "Bern", "Oslo")


def item(kind: Any, *answers: str) -> Item:
    return Item("x", kind, "?", answers, OPTIONS if kind == "choice" else ())


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("42", "42"),
        ("  **42**.", "42"),
        ("$1,234", "1234"),
        ("1{,}234", "1234"),
        (r"1\,234\,567", "1234567"),
        (r"\$\text{ }42\%", "42"),
        (r"\text{42 apples}", "42"),
        ("42.00", "42"),
        ("-0", "0"),
        ("\u22125", "-5"),
        ("+007", "7"),
        ("４２", "42"),
        ("x = 42", "42"),
        ("6 * 7 = 42", "42"),
        ("42, as 6 * 7 = 43 - 1", "42"),
        ("42 (7 each for 6)", "42"),
        ("about 42 metres", "42"),
        ("9" * 5000, "9" * 5000),
        ("42.5", None),
        ("3/4", None),
        (r"\frac{3}{4}", None),
        ("2^{10}", None),
        ("10^3", None),
        ("3 - 4", None),
        ("3, 4 and 5", "3"),
        ("between 3 and 4", None),
        ("1 000", None),
        ("1,23", None),
        ("1.2.3", None),
        ("1e3", None),
        ("0x1F", None),
        (r"2 \times 3", None),
        ("none", None),
        ("", None),
    ],
)
def test_the_integer_a_short_text_states(text: str, found: str | None) -> None:
    assert stated(text) == found


@given(
    st.integers(),
    st.sampled_from(["{}", "{:,}", "{}.0", "**{:,}**", "${:,}$", "x = {}", "the {} apples", r"\text{{{}}}"]),
)
def test_every_integer_is_read_in_every_form(number: int, form: str) -> None:
    assert stated(form.format(number)) == str(number)


@given(st.integers(-(10**30), 10**30), st.integers(0, 5), st.integers(0, 3))
def test_canonical_is_one_for_all_spellings(number: int, zeros: int, decimals: int) -> None:
    sign = "-" if number < 0 else ""
    spelt = f"{sign}{'0' * zeros}{abs(number)}{'.' + '0' * decimals if decimals else ''}"
    assert NUMBER.fullmatch(spelt) and canonical(spelt) == str(number)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (r"so \boxed{42}", "42"),
        (r"\boxed{1} and then \boxed{ 2 }", " 2 "),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{a \boxed{b}}", r"a \boxed{b}"),
        (r"\boxed{\{1\}}", r"\{1\}"),
        (r"\boxed{1} and \boxed{2", "1"),
        (r"} \boxed {3} {", "3"),
        (r"\\boxed{4}", "4"),
        (r"\boxed 5", None),
        (r"boxed{6}", None),
    ],
)
def test_the_last_complete_box(text: str, found: str | None) -> None:
    assert boxed(text) == (found if text != r"\\boxed{4}" else None)


@pytest.mark.parametrize(
    ("reply", "begun", "answer"),
    [
        ("plain", False, "plain"),
        ("because</think>42", True, "42"),
        ("<think>because</think>42", False, "42"),
        ("a</think>b</think>c", True, "b</think>c"),
        ("because", True, None),
        (" <think>because", False, None),
        ("it says <think> here", False, "it says <think> here"),
        ("", True, None),
    ],
)
def test_reasoning_is_no_answer(reply: str, begun: bool, answer: str | None) -> None:
    assert without_reasoning(reply, begun) == answer


def test_the_last_readable_marker_counts() -> None:
    assert list(marked("Answer: 1\nThe answer is **2**\n**Answer**: 3\n答案是4\n#### 5\nanswers are 6")) == [
        "5",
        "4",
        "3",
        "2**",
        "1",
    ]
    reply = "The answer is 7. I hope this answer is helpful."
    assert vars(score(item("integer", "7"), reply)) == {"correct": True, "answer": "7", "how": "marked"}


@pytest.mark.parametrize(
    ("reply", "answer", "how"),
    [
        ("B", "B", "alone"),
        ("(b) is wrong", None, ""),
        ("(B) Rome", "B", "alone"),
        ("**B.** Rome", "B", "alone"),
        ("Rome.", "B", "option"),
        ("It is A or B. Answer: **C**", "C", "marked"),
        ("The answer is (c).", "C", "marked"),
        ("The answer is option D, Oslo", "D", "marked"),
        ("Answer: B) Rome", "B", "marked"),
        ("the answer is b", "B", "marked"),
        (r"\boxed{\text{B}}", "B", "boxed"),
        (r"Answer: A, no: $\boxed{d}$", "D", "boxed"),
        (r"Answer: C. Let $\boxed{x}$.", "C", "marked"),
        ("The answer is not A", None, ""),
        ("The answer is a city in Italy", None, ""),
        ("Answer: E", None, ""),
        ("Answer: Bern", None, ""),
        ("All of them", None, ""),
        ("A city", None, ""),
        ("", None, ""),
    ],
)
def test_the_letter_of_a_choice(reply: str, answer: str | None, how: str) -> None:
    assert vars(score(item("choice", "B"), reply)) == {"correct": answer == "B", "answer": answer, "how": how}


@pytest.mark.parametrize(
    ("reply", "strict", "answer", "how"),
    [
        (r"12 + 30 = \boxed{42}", False, "42", "boxed"),
        (r"\boxed{x+1} is no number. The answer is 42.", False, "42", "marked"),
        ("12 + 30 = 42 #### 42", True, "42", "marked"),
        ("That makes 12, no, 42.", False, "42", "last"),
        ("That makes 12, no, 42.", True, None, ""),
        (r"1 or 2: \boxed{\frac12}", False, None, ""),
        ("That makes 4.5", False, None, ""),
    ],
)
def test_the_integer_of_a_reply(reply: str, strict: bool, answer: str | None, how: str) -> None:
    assert vars(score(item("integer", "42"), reply, strict)) == {
        "correct": answer == "42",
        "answer": answer,
        "how": how,
    }


@pytest.mark.parametrize(
    ("reply", "answer", "how"),
    [
        ("The Seine.", "the seine", "whole"),
        ("I think so. Answer: «Seine»!", "seine", "marked"),
        (r"\boxed{SEINE}", "seine", "boxed"),
        ("ＳＥＩＮＥ\u00a0", "seine", "whole"),
        ("Seine\n\nor Rhône", "seine or rhône", "whole"),
        (" .,! ", None, ""),
    ],
)
def test_the_words_of_a_reply(reply: str, answer: str | None, how: str) -> None:
    of = item("exact", "seine", "the seine")
    assert vars(score(of, reply)) == {"correct": answer in of.answers, "answer": answer, "how": how}


@given(st.text())
def test_normalising_twice_changes_nothing(text: str) -> None:
    assert normalised(normalised(text)) == normalised(text)


NASTY = st.text(st.sampled_from(list("\\boxed{}()[] \n*_$#:=.,-+/^0123456789aABCDanswer is</think>٣４½\u202e\0\ud7ff")))


@given(NASTY, st.sampled_from(["choice", "exact", "integer"]), st.booleans())
def test_any_reply_has_a_score(reply: str, kind: Any, strict: bool) -> None:
    found = score(item(kind, "B"), reply, strict)
    assert found.correct == (found.answer == "B")
    assert (found.answer is None) == (found.how == "")
    if kind == "choice":
        assert found.answer is None or found.answer in "ABCD"
    if kind == "integer" and found.answer is not None:
        assert canonical(found.answer) == found.answer


@pytest.mark.parametrize(
    "piece",
    ["\\boxed{", "{", "answer is ", "answer", "#### ", " ", "\\text{", "1,", "1,000,", "-", "$", "\\,", "*", "A)"],
)
@pytest.mark.parametrize("kind", ["choice", "exact", "integer"])
def test_time_is_linear_in_the_reply(piece: str, kind: Any) -> None:
    """A quadratic rule would take minutes; the bound is one that a slow machine keeps too."""
    reply = piece * (100_000 // len(piece))
    begun = time.process_time()
    score(item(kind, "B"), reply)
    assert time.process_time() - begun < 10
