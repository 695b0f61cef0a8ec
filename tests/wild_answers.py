"""What each command does with a published draft, and the table of it: `wild/README.md`.

Usage: `.venv/bin/python tests/wild_answers.py` writes the table anew; `test_wild.py` holds it.

`inspect`, `plan` and `check` are asked about the folder in its real sizes, whose data is a hole;
`quantize`, with `verify` behind it, and `replay` about one whose widths are divided by 32.
"""

import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from by_recipe import draft_of, planned, quantized, read_as
from draftquant.calibration.passes.draft_inputs import default_aux_layer_ids
from draftquant.quantize.engines.contract import EngineName
from draftquant.quantize.engines.engine_check import check_checkpoint, with_maths
from draftquant.quantize.files.checkpoint import Checkpoint
from draftquant.quantize.stored.loading import load_draft
from draftquant.recipes import DraftQuantError
from draftquant.validate.counting.draft_counts import DraftReplay
from draftquant.validate.counting.trace_replay import replay_drafts
from said_traces import write_said
from wild_drafts import DRAFTS_FILE, WildDraft, wild_drafts

TABLE_FILE = DRAFTS_FILE.parent / "README.md"
RECIPES = ("fp8-ptpc", "int4-group128")
ENGINES: tuple[EngineName, ...] = ("vllm", "sglang")
_DIVIDE = 32
_NUM_TARGET_LAYERS = 128
_MOST_OF_AN_ERROR = 300
_VERDICTS = ("refused", "loads but wrong", "unknown")
HEAD = """# What draftquant does with {count} published drafts

Of these {count} drafts, draftquant plans {planned}, quantizes and verifies {quantized}, and replays
{replayed}. `check` decides {decided} for both engines. {named} are read, or refused with the
name of what they are.

The drafts are as they are published, or as the configs of their trainers make them. Only their
config.json and the names and shapes of their tensors were taken. `tests/wild_answers.py` writes
this page, and `tests/test_wild.py` keeps it current.

The column `inspect` has the family and the lints. The columns of the recipes have the share of
bytes that remains. `vllm` and `sglang` have the answer of `check` for the BF16 draft. A number
refers to the messages below.
"""


class Answer(NamedTuple):
    """Of one command: whether it did what was asked, and what it said."""

    good: bool
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """Of all commands about one draft, by column."""

    draft: WildDraft
    said: Mapping[str, Answer]

    @property
    def planned(self) -> bool:
        return any(self.said[recipe].good for recipe in RECIPES)

    @property
    def decided(self) -> bool:
        return all(self.said[engine].text.startswith(("loads", "refused")) for engine in ENGINES)

    @property
    def named(self) -> bool:
        inspected = self.said["inspect"]
        marks = ("not supported", "does not know the maths of")
        return inspected.good or any(mark in inspected.text for mark in marks)


def ask(draft: WildDraft, work: Path) -> Answers:
    """Ask every command about a draft; `work` is an empty folder."""
    real = draft.write(work / "real")
    small = draft.write(work / "small", divide=_DIVIDE)
    found = {"inspect": said(_inspect, real)}
    for recipe in RECIPES:
        found[recipe] = said(_plan, real, recipe)
    found["quantize"] = said(_quantize, small, work / "quantized")
    for engine in ENGINES:
        found[engine] = said(_check, real, engine)
    found["replay"] = said(_replay, small, work / "traces")
    return Answers(draft=draft, said=found)


def said(command: object, *arguments: object) -> Answer:
    """The answer of a command, or its error."""
    assert callable(command)
    try:
        answer = command(*arguments)
    except DraftQuantError as exc:
        where = exc.where.rpartition("config.json")[2].lstrip(": ")
        text = f"{where}: {exc.what}" if where and "/" not in where else exc.what
        return Answer(False, f"{text}; fix: {exc.fix}")
    assert isinstance(answer, Answer)
    return answer


def _inspect(folder: Path) -> Answer:
    draft = draft_of(folder)
    lints = sorted(read_as(draft, draft.checkpoint.config)[1])
    return Answer(True, ", ".join([draft.family.name, *lints]))


def _plan(folder: Path, recipe: str) -> Answer:
    plan = planned(folder, recipe)
    return Answer(True, f"{plan.bytes_after / plan.bytes_before:.0%}")


def _quantize(folder: Path, out: Path) -> Answer:
    quantized(folder, "fp8-ptpc", out)
    return Answer(True, "verified")


def _check(folder: Path, engine: EngineName) -> Answer:
    checkpoint = Checkpoint.open(folder)  # whose zeros are finite, and are not read here
    found = with_maths(check_checkpoint(checkpoint, engine=engine, has_side_file=False), checkpoint)
    error = f": {found.error}" if found.error else ""
    return Answer(found.verdict == "LOADS", f"{found.verdict.lower()}{error}")


def _replay(folder: Path, traces: Path) -> Answer:
    (played,) = replayed((folder,), traces)
    assert played.prompts
    return Answer(True, "runs")


def replayed(folders: Sequence[Path], traces: Path, *, tokens: int = 8) -> Sequence[DraftReplay]:
    """One draft in several folders, along a text of so many tokens, which `traces` gets."""
    geometry = draft_of(folders[0]).geometry
    hidden = geometry.hidden_size
    shared = {
        "embed_tokens.weight": torch.randn(geometry.vocab_size, hidden),
        "lm_head.weight": torch.randn(geometry.draft_vocab_size, hidden),
    }
    drafts = [load_draft(folder, shared=shared) for folder in folders]
    fuses = geometry.reads_layers
    ids = geometry.aux_layer_ids or default_aux_layer_ids(_NUM_TARGET_LAYERS)
    told = write_said(
        traces, prompts=1, tokens=tokens, vocab=geometry.vocab_size, num_layers=_NUM_TARGET_LAYERS,
        layers=ids if fuses else (_NUM_TARGET_LAYERS - 1,),
        width=geometry.num_aux_layers * geometry.target_hidden_size,
        fusion_sha256=None if fuses else drafts[0].fusion_sha256,
    )  # fmt: skip
    return replay_drafts(drafts, told, num_draft_tokens=3)


def table(answers: Sequence[Answers]) -> str:
    """The text of README.md."""
    columns = ("inspect", *RECIPES, "quantize", *ENGINES, "replay")
    lines = [HEAD.format(count=len(answers), **figures(answers))]
    lines.append(f"| draft | {' | '.join(columns)} |")
    lines.append("|---" * (1 + len(columns)) + "|")
    errors: dict[str, int] = {}
    for each in answers:
        cells = [cell(each.said[column], errors) for column in columns]
        lines.append(f"| {each.draft.name} | {' | '.join(cells)} |")
    lines += ["", "## Messages", ""]
    lines += [f"{number}. {text}" for text, number in errors.items()]
    lines += ["", "## Sources", ""]
    lines += [f"- {each.draft.name}: {each.draft.source}" for each in answers]
    return "\n".join(lines) + "\n"


def figures(answers: Sequence[Answers]) -> dict[str, int]:
    """How many drafts each command has an answer for."""
    return {
        "planned": sum(each.planned for each in answers),
        "quantized": sum(each.said["quantize"].good for each in answers),
        "decided": sum(each.decided for each in answers),
        "replayed": sum(each.said["replay"].good for each in answers),
        "named": sum(each.named for each in answers),
    }


def cell(answer: Answer, errors: dict[str, int]) -> str:
    """A short answer, or the number of a long one."""
    verdict, colon, rest = answer.text.partition(": ")
    if answer.good or not colon:
        return answer.text
    told = verdict if verdict in _VERDICTS else "refused"
    text = _short(rest if verdict in _VERDICTS else answer.text)
    return f"{told} ({errors.setdefault(text, len(errors) + 1)})"


def _short(text: str) -> str:
    """Without folders, and no longer than a line or two."""
    text = re.sub(r"/\S*/(real|small)\b", "DRAFT", text)
    return text if len(text) <= _MOST_OF_AN_ERROR else text[:_MOST_OF_AN_ERROR] + " …"


def ask_all() -> list[Answers]:
    """Ask about every draft of the list."""
    found = []
    for draft in wild_drafts():
        with tempfile.TemporaryDirectory() as work:
            found.append(ask(draft, Path(work)))
    return found


if __name__ == "__main__":
    TABLE_FILE.write_text(table(ask_all()), encoding="utf-8")
