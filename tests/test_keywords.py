"""What the command line calls `--num-draft-tokens` is `num_draft_tokens=` for who calls Python."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from draftquant import api as dq
from draftquant.scripts.frame.keywords import Keywords, keywords_of
from test_packaging import ROOT

PAIR = Path(__file__).parent / "pairs" / "eagle3-llama"
OURS = {flag for name in dq.VERBS for flag in keywords_of(getattr(dq, name).form)}
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*(?![\w-])")
SAID = (
    ("record", "--max-new-tokens", "record(max_new_tokens=)"),
    ("record", "--engine sglang", 'record(engine="sglang")'),
    ("gate", "record with --draft D --fused", "record with draft=D fused=True"),
    ("gate", "draftquant record --draft D --fused", "record(draft=D, fused=True)"),
    ("replay", "(draftquant replay, with and without --rope-theta 10000)",
     "(replay(), with and without rope_theta=10000)"),
    ("gate", "or two, --measured A B; or all", "or two, measured=[A, B]; or all"),
    ("plan", "--algorithm awq, backend torch", 'plan(algorithm="awq"), backend torch'),
    ("plan", "draftquant card /a/b --out /a/README.md --overwrite (with --gate G.json if you have)",
     'card("/a/b", out="/a/README.md", overwrite=True) (with gate="G.json" if you have)'),
    ("card", "look again: draftquant verify --target", "look again: verify(target=...)"),
    ("quantize", "draftquant unpickle draft --out SAFE", 'unpickle("draft", out=SAFE)'),
    ("quantize", "--fix-config corrects it there", "fix_config=True corrects it there"),
    ("quantize", "pass --traces, or --input-scale 1.0", "pass traces=, or input_scale=1.0"),
    ("replay", "as served, such as -k 3", "as served, such as num_draft_tokens=3"),
    ("record", "'draftquant record --help' names them", "'help(record)' names them"),
    ("measure", "start it with --served-model-name", "start it with --served-model-name"),
    ("record", "or name them: --aux-layers I,J,K", "or name them: aux_layer_ids=[I, J, K]"),
    ("check", "'draftquant parity run-tasks' and record of it",
     "'parity_run_tasks()' and record of it"),
    ("gate", "give BF16 QUANT --traces T too", "give baseline= candidate= traces=T too"),
    ("gate", "the BF16 draft", "the BF16 draft"),
    ("card", "FOLDER", "card(folder=)"),
)  # fmt: skip


def test_options_and_commands_in_the_words_of_python() -> None:
    said = [(verb, text, Keywords(getattr(dq, verb).form).place(text)) for verb, text, _ in SAID]
    assert said == list(SAID)


def messages() -> set[str]:
    """Every text in the source that names an option, but for docstrings."""
    found = set[str]()
    for house in ("recipes", "quantize", "calibration", "validate", "scripts/verbs"):
        for text in (path.read_text(encoding="utf-8") for path in (ROOT / house).rglob("*.py")):
            if FLAG.search(text):
                found |= {*texts_of(compile(text, "", "exec", optimize=2).co_consts)}
    return found


def texts_of(constants: Any) -> Iterator[str]:
    for each in constants:
        if isinstance(each, str) and FLAG.search(each):
            yield each
        elif not isinstance(each, str):
            yield from texts_of(
                getattr(each, "co_consts", each if isinstance(each, tuple | frozenset) else ())
            )


def test_no_option_of_ours_is_left_in_any_message() -> None:
    texts = messages()
    assert len(texts) > 200
    say = Keywords(dq.gate.form)
    left = {(flag, text) for text in texts for flag in FLAG.findall(say(text)) if flag in OURS}
    assert left == set()


CALLS: tuple[tuple[Callable[[], object], str], ...] = (
    (lambda: dq.record(PAIR / "target", PAIR / "prompts.jsonl"), r"record\(out=\): "),
    (lambda: dq.record(PAIR / "target", PAIR / "prompts.jsonl", "x", fused=True),
     r"record\(fused=\)"),
    (lambda: dq.check(PAIR / "draft", "vllm", tp=0), r"check\(tp=\)"),
    (lambda: dq.check(PAIR / "draft", "vllm", gpu="rtx"), r"check\(gpu=\)"),
    (lambda: dq.gate(), r"expected baseline= candidate= traces=T, got no baseline=, "),
    (lambda: dq.gate(measured=["a", "b"], target="t"), r"gate\(target=\)"),
    (lambda: dq.card(PAIR / "draft", overwrite=True), r"card\(overwrite=\)"),
    (lambda: dq.compare([PAIR / "draft"], target="t"), r"compare\(target=\)"),
    (lambda: dq.estimate(PAIR / "draft", gpus=["gtx"]), r"estimate\(gpus=\)"),
    (lambda: dq.estimate(PAIR / "draft", efficiency=2), r"estimate\(efficiency=\)"),
    (lambda: dq.measure(), r"measure"),
    (lambda: dq.plan(PAIR / "draft", "fp8-ptpc", algorithm="awq"), r'algorithm="awq"\), b'),
    (lambda: dq.quantize(PAIR / "draft", "blackwell-fp8", "x"), r"quantize|traces="),
    (lambda: dq.recipes_list(family="gpt"), r"recipes_list\(family=\)"),
    (lambda: dq.verify("x"), r"verify\(against=\)"),
    (lambda: dq.traces_split("t", ["a", "b"], fraction=2), r"traces_split\(fraction=\)"),
    (lambda: dq.parity_sampled("a", "b", "p"), r"parity_sampled\(target=\)"),
)  # fmt: skip


def test_errors_of_every_verb_name_keyword_arguments() -> None:
    for call, where in CALLS:
        with pytest.raises(dq.DraftQuantError, match=where) as caught:
            call()
        exc = caught.value
        for text in (str(exc), exc.where, exc.what, exc.fix, *exc.details):
            assert not set(FLAG.findall(text)) & OURS, text
