"""The page of the gate's report, from the dataclasses that write and read it."""

import dataclasses
import typing
from collections.abc import Iterator
from typing import Any

from ....validate.comparison.sources import ReplayedDraft
from ....validate.golden.golden_acceptance import Golden
from ....validate.golden.profile import Profile
from ....validate.judging.judgement import GateReport
from ....validate.report.document import FORMAT, SCHEMA_VERSION, ReportHeader
from ....validate.served.joint_report import JointReport
from .markdown import page, text
from .traces import part

_INTRODUCTION = f"""\
`gate --report G.json` writes one JSON object, and `report`, `compare` and `card` read it. `format`
is always `"{FORMAT}"` and `schema_version` is {SCHEMA_VERSION}. A reader that finds another version
should stop and run the gate again. The keys of a `ReportHeader` come first. `kind` says which keys
follow: those of a `GateReport` (`"comparison"`) or those of a `JointReport` (`"joint"`)."""
_RULES = """\
`sha256` identifies a draft: it is the SHA-256 of the names and BLAKE3 digests of all its tensors.
Logarithmic figures (`log_ratio`, `lower`, `upper`) are of the ratio candidate / baseline, so the
relative change is exp(x) - 1. None is null. Equal runs give equal files except for
`date`, which SOURCE_DATE_EPOCH sets."""
_AGAIN = """\
A reader computes the verdict, all bounds, figures and categories again from the histograms of all
prompts, the policy, the planned analysis and the background. It refuses a value that does not
follow, with exit code 2 and the key. It accepts as written what no counts show: `prompts`,
`policy`, `look`, `background`, `traces`, `first_step`, `served`, `parity`, `drafts`, `engines`,
`environment` and `argv`; but the hashes in `drafts` must equal those in `background`."""
_GOLDEN = """\
`--golden G.json` writes counts; `golden --for profile` the figures that follow, with keys of schema
1.0 of Model-Optimizer's pull request 2247. Those of other producers are read over."""
_MEANINGS = {
    "asked": "what `check --ask` of the candidate answered, in one line; null if it was not given",
    "argv": "the command line, without folders and tokens; empty if Python called",
    "certainly_lost": "too few prompts to be judged, but even the upper bound is beyond the limit",
    "cluster": "prompts with the same text here are judged as one; empty = judged alone",
    "common_share": "share of the verify steps in text that both servers wrote",
    "conditional": "K shares of the steps that got so far",
    "context_bins": "the histogram of each context bin; the last ones are left out if empty",
    "histogram": "K + 1 counts of verify steps, by number of accepted tokens",
    "kv_cache": "dtype and scales of the draft's KV cache; null = not rounded",
    "launch": "the command that serves the draft; null if it does not load",
    "not_compared": "what another tool's files do not show of two runs; nothing passes with one",
    "survival": "K shares of the steps that accepted at least 1 .. K tokens",
    "vocabulary": "rows of a cut head; null = the head has all tokens of the target",
}
"""Meanings of keys that neither their names nor their dataclasses explain."""


def report_page() -> str:
    """Every key of a report, of what `replay --json` prints, and of golden acceptance."""
    seen: list[type] = []
    return page(
        "Report format",
        text(_INTRODUCTION),
        text(_RULES),
        *_parts(ReportHeader, seen),
        *_parts(GateReport | JointReport, seen),
        "## A report that is read",
        text(_AGAIN),
        "## What `replay --json` prints",
        "A list with one `ReplayedDraft` for each draft, in the order in which they were given.",
        *_parts(ReplayedDraft, seen),
        "## Golden acceptance",
        text(_GOLDEN),
        *_parts(Golden, seen),
        *_parts(Profile, seen),
    )


def _parts(hint: Any, seen: list[type]) -> Iterator[str]:
    """The keys of each dataclass in a type and in its fields, if not listed yet."""
    if dataclasses.is_dataclass(hint) and hint not in seen:
        cls = typing.cast("type", hint)
        seen.append(cls)
        yield part(cls, _MEANINGS)
        for each in typing.get_type_hints(cls).values():
            yield from _parts(each, seen)
    for inner in typing.get_args(hint):
        yield from _parts(inner, seen)
