"""The page of the gate's report, from the dataclasses that write and read it."""

import dataclasses
import inspect
import re
import typing
from collections.abc import Iterator, Mapping
from typing import Any

from ....validate.comparison.sources import ReplayedDraft
from ....validate.golden.golden_acceptance import Golden
from ....validate.judging.judgement import GateReport
from ....validate.report.document import FORMAT, SCHEMA_VERSION, Header
from ....validate.served.joint_report import JointReport
from .markdown import code, page, table, text
from .traces import attributes

_INTRODUCTION = f"""\
`gate --report G.json` writes one JSON object, and `report`, `compare` and `card` read it. `format`
is always `"{FORMAT}"` and `schema_version` is {SCHEMA_VERSION}. A reader that finds another version
should stop and run the gate again. The keys of a `Header` come first. `kind` says which keys
follow: those of a `GateReport` (`"comparison"`) or those of a `JointReport` (`"joint"`). `None` is
null in JSON."""
_RULES = """\
`sha256` identifies a draft: it is the SHA-256 of the names and BLAKE3 digests of all its tensors.
Logarithmic figures (`log_ratio`, `lower`, `upper`) are of the ratio candidate / baseline, so the
relative change is exp(x) - 1. Shares lie between 0 and 1. Equal runs give equal files except for
`date`, which SOURCE_DATE_EPOCH sets."""
_AGAIN = """\
A reader computes the verdict again from the histograms of all prompts, the policy, the planned
analysis and the background, and so all bounds, figures and categories. It refuses a value that does
not follow, with exit code 2 and the key. It accepts as written what no counts show: `prompts` with
their context bins, `context_edges`, `num_short_prompts`, `policy`, `look`, `background`, `traces`,
`first_step`, `every_position_mean_acceptance_length`, `served`, `parity`, `drafts`, `engines`,
`environment` and `argv`. The hashes in `drafts` must equal those in `background`."""
_GOLDEN = """\
What `--golden G.json` of `replay`, `gate`, `report` and `measure` writes and `golden` reads. Every
figure follows from `prompts`, and a file that was edited is refused with the key."""
_MEANINGS = {
    "alike": "the cluster by the texts alone, without what the prompt file declares",
    "argv": "the command line, without folders and tokens; empty if Python called",
    "arch": "GPU architecture; null = any GPU",
    "certainly_lost": "too few prompts to be judged, but even the upper bound is beyond the limit",
    "cluster": "prompts with the same text here are judged as one; empty = judged alone",
    "common_share": "share of the verify steps in text that both servers wrote",
    "conditional": "K shares of the steps that got so far",
    "context_bins": "the histogram of each context bin; the last ones are left out if empty",
    "draft_sampling": "how the draft chose its proposals",
    "effective_num_prompts": "effective sample size",
    "environment": "the version of each package that the figures depend on",
    "error": "the engine's own text; null if nothing is wrong",
    "evidence": "what the verdict rests on",
    "first_step_agreement": "share of positions with the first draft's first proposal",
    "histogram": "K + 1 counts of verify steps, by number of accepted tokens",
    "identical_share": "share of the prompts with equal outputs",
    "kv_cache": "dtype and scales of the draft's KV cache; null = not rounded",
    "launch": "the command that serves the draft; null if it does not load",
    "not_compared": "what another tool's files do not show of two runs; nothing passes with one",
    "outcome": "PASS, FAIL or INCONCLUSIVE; null = too few prompts to be judged",
    "quantization": "recipe, `none`, or what the measurement declared; null = not known",
    "remedy": "what to do; null if nothing is wrong",
    "shorter": "the histograms for K = 1 up to K - 1",
    "skewness": "of the changes of the prompts; it widens the bounds",
    "survival": "K shares of the steps that accepted at least 1 .. K tokens",
    "told_positions": "false if a tool keeps only the sums of each request",
    "tool": "that measured, if it was not `draftquant measure`",
    "unrecorded": "no record says how the candidate's folder was quantized",
    "vocabulary": "rows of a cut head; null = the head has all tokens of the target",
}
"""Of keys whose name does not say it and whose dataclass does not either."""


def report_page() -> str:
    """Every key of a report, of what `replay --json` prints, and of golden acceptance."""
    seen: list[type] = []
    return page(
        "Report format",
        text(_INTRODUCTION),
        text(_RULES),
        *(_part(each) for each in _classes(Header, seen)),
        *(_part(each) for each in _classes(GateReport, seen)),
        *(_part(each) for each in _classes(JointReport, seen)),
        "## A report that is read",
        text(_AGAIN),
        "## What `replay --json` prints",
        "A list with one `ReplayedDraft` for each draft, in the order in which they were given.",
        *(_part(each) for each in _classes(ReplayedDraft, seen)),
        "## Golden acceptance",
        text(_GOLDEN),
        *(_part(each) for each in _classes(Golden, seen)),
    )


def _classes(cls: type, seen: list[type]) -> Iterator[type]:
    """A dataclass and all that stand in it, each once."""
    if cls in seen:
        return
    seen.append(cls)
    yield cls
    for hint in typing.get_type_hints(cls).values():
        for inner in _inside(hint):
            yield from _classes(inner, seen)


def _inside(hint: Any) -> Iterator[type]:
    if dataclasses.is_dataclass(hint):
        yield typing.cast("type", hint)
    for inner in typing.get_args(hint):
        yield from _inside(inner)


def _part(cls: type) -> str:
    hints, meanings = typing.get_type_hints(cls), attributes(cls)
    rows = (
        [code(each.name), code(_type(hints[each.name])), text(_meaning(each.name, meanings))]
        for each in dataclasses.fields(cls)
    )
    about = inspect.cleandoc(cls.__doc__ or "").partition("\n\n")[0]
    return f"### {cls.__name__}\n\n{text(about)}\n\n" + table(["key", "type", "meaning"], rows)


def _type(hint: Any) -> str:
    """As Python says it, without modules: `tuple[RuleFacts, ...]`."""
    return re.sub(r"(?:\w+\.)+(\w+)", r"\1", inspect.formatannotation(hint))


def _meaning(name: str, meanings: Mapping[str, str]) -> str:
    return meanings.get(name) or _MEANINGS.get(name, "")
