"""Patterns of excludes: what `re` answers, in bounded time, and an honest refusal of the rest."""

import contextlib
import re
import time

import pytest
from draftquant.quantize.stored.layouts.module_patterns import PatternProblem, matches
from hypothesis import given, settings
from hypothesis import strategies as st

NAMES = (
    "",
    "fc",
    "model.fc",
    "model.layers.0.self_attn.q_proj",
    "model.layers.61.mlp.gate_up_proj",
    "model.layers.117.fc",
    "midlayer.mlp.down_proj\n",
    "lm_head",
    "a b-c_d\ne\u0663é",
)
REAL = (
    ".*fc$",
    r"model\.layers\.\d+\.self_attn\..*",
    r"(model\.)?fc$",
    r".*layers\.(0|1|61)\.mlp\.(gate|up|gate_up)_proj$",
    r"^(?!.*mlp).*proj$",
    ".*[.]qkv_proj$",
    r".*?layers\.[0-9]{1,2}\..*",
    r"\bmodel\b",
    "a|lm_head|",
    r"(?:\w+\.)+(?=down)\w*$",
    "(a?)*(b|){3}m",
    r"[^\W\d]+[\s.-]",
    "(m{0,2}){2,}o",
)

PIECES = st.sampled_from(
    ["a", "b", ".", r"\.", r"\d", r"\w", r"\W", "[ab]", "[^a.]", "[a-c]", "^", "$", r"\b", r"\Z",
     "(?=a)", "(?!b)", "(?!.*c)", "é", "-", "]", "}"]
)  # fmt: skip
COUNTS = st.sampled_from(["", "", "*", "+", "?", "*?", "+?", "{2}", "{,2}", "{1,}", "{0,1}?"])


def grown(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    item = st.tuples(inner.map("({})".format) | inner.map("(?:{})".format), COUNTS)
    return st.lists(item.map("".join), min_size=1, max_size=3).flatmap(
        lambda items: st.sampled_from(["".join(items), "|".join(items)])
    )


PATTERNS = st.recursive(
    st.lists(st.tuples(PIECES, COUNTS).map("".join), max_size=4).map("".join), grown, max_leaves=4
)


@pytest.mark.parametrize("pattern", REAL)
def test_the_answer_is_that_of_re(pattern: str) -> None:
    for name in NAMES:
        assert matches(pattern, name) == bool(re.match(pattern, name)), name
        assert matches(pattern, name, whole=True) == bool(re.fullmatch(pattern, name)), name


@settings(max_examples=20)
@given(PATTERNS, st.text("abc.-1\n", max_size=7))
def test_the_answer_is_that_of_re_for_any_pattern(pattern: str, name: str) -> None:
    try:
        compiled = re.compile(pattern)
    except re.error:
        with pytest.raises(PatternProblem):
            matches(pattern, name)
        return
    with contextlib.suppress(PatternProblem):  # `re` repeats a lookahead too
        assert matches(pattern, name) == bool(compiled.match(name))
        assert matches(pattern, name, whole=True) == bool(compiled.fullmatch(name))


@pytest.mark.parametrize("pattern", [
    "(([a-z._0-9])+)+!",
    "(a+)+$",
    "(a|a)*$",
    "(.*.*.*.*.*.*.*.*.*.*.*.*.*.*)*!",
    "(((a{0,999}){0,999}){0,999}){0,999}!",
    "(?=" * 15 + "a+" + ")" * 15 + "!",
    "(?:(?:(?:a?){1000}){1000}){1000}!",
])  # fmt: skip
def test_no_pattern_takes_long(pattern: str) -> None:
    began = time.process_time()
    with contextlib.suppress(PatternProblem):  # too many steps
        assert not matches(pattern, "a" * 200 + "?")
    assert time.process_time() - began < 0.5


@pytest.mark.parametrize(
    ("pattern", "what"),
    [
        ("(" * 5000 + ")" * 5000, "more than 500 characters"),
        ("*fc", "nothing to repeat"),
        ("a{99999999999}", "repetition number is too large"),
        ("a++", "possessive"),
        (r"(a)\1", "groupref"),
        ("(?i)fc", "flags are not understood"),
        ("(?<=a)b", "assert is not understood"),
        ("(?>a)b", "atomic_group is not understood"),
        (r"a\B", "at is not understood"),
    ],
)
def test_what_is_not_understood_is_said(pattern: str, what: str) -> None:
    with pytest.raises(PatternProblem, match=what):
        matches(pattern, "model.fc")
