"""foreign.json and FOREIGN.md: how often `check` is right of folders of other tools."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from folder_rows import read_rows, row_of, write_rows

MOST_UNKNOWN = 0.05
"""Of all answers."""


class Answer(NamedTuple):
    """An outcome of a loader, and what `check` says of the same."""

    outcome: Mapping[str, Any]
    verdict: str
    error: str | None

    @property
    def tool(self) -> str:
        """Which tool made the folder."""
        name: str = self.outcome["draft"].rpartition("/")[2]
        return name.partition("--")[0]

    @property
    def kind(self) -> str:
        """How good the answer is. What the fakes could not tell refutes nothing."""
        told = self.outcome["verdict"]
        if told == "UNKNOWN":
            return "not told"
        if self.verdict == "UNKNOWN":
            return "unknown"
        if self.verdict == told:
            return "right"
        return "wrong LOADS" if self.verdict == "LOADS" else f"wrong {self.verdict}"


COLUMNS = ("right", "unknown", "wrong LOADS", "wrong REFUSED", "wrong LOADS BUT WRONG", "not told")


def is_good_enough(answers: Sequence[Answer]) -> bool:
    """Nothing is wrong, and little is unknown."""
    kinds = Counter(answer.kind for answer in answers)
    wrong = sum(count for kind, count in kinds.items() if kind.startswith("wrong"))
    return not wrong and kinds["unknown"] < MOST_UNKNOWN * len(answers)


def table(answers: Sequence[Answer]) -> str:
    """Right, unknown and wrong by tool and engine, as Markdown."""
    counts: dict[tuple[str, str], Counter[str]] = {}
    for answer in answers:
        for key in ((answer.tool, answer.outcome["engine"]), ("all", "both")):
            counts.setdefault(key, Counter())[answer.kind] += 1
    rows = [f"| tool | engine | answers | {' | '.join(COLUMNS)} |", f"|{'---|' * 9}"]
    for (tool, engine), kinds in sorted(counts.items(), key=lambda item: item[0][0] == "all"):
        cells = " | ".join(str(kinds[column]) for column in COLUMNS)
        rows.append(f"| {tool} | {engine} | {kinds.total()} | {cells} |")
    return "\n".join(rows)


_INTRODUCTION = """# What `draftquant check` says about folders of other tools

This page compares `check` with the engines on {folders} folders of other tools. `experiments/run
foreign` writes it: the tools' own code made the folders from tiny drafts in other dimensions,
with several layers and architecture names, and the engines' own classes loaded them on simulated
GPUs ({platforms}) in 1 to 8 shards. sm80 is A100, sm90 H200, sm100 B200, gfx942 MI325X and gfx950
MI355X.

- **right**: `check` predicted what the engine did. **unknown**: it gave no prediction.
- **wrong LOADS**: it said LOADS, but the engine refused the folder or loaded it wrongly. The other
  columns of wrong answers have the same form.
- **not told**: the substitute for a kernel was called before the folder was loaded, so the engine
  did not answer.

"""


def write_sample(file: Path, drafts: Path, outcomes: Sequence[Mapping[str, Any]]) -> None:
    """One folder of each scheme of each tool, with as many kinds of answers as there are.

    Those of tools that made none stay: AutoAWQ's, which nobody maintains.

    Args:
        drafts: where the folders lie.
        outcomes: of the loaders; those that could not tell are left out.
    """
    told: dict[str, list[Mapping[str, Any]]] = {}
    for outcome in outcomes:
        if outcome["verdict"] != "UNKNOWN":
            told.setdefault(outcome["draft"], []).append(outcome)
    by_scheme: dict[str, list[dict[str, Any]]] = {}
    for draft in sorted(told):
        row = row_of(drafts / draft, told[draft])
        by_scheme.setdefault(draft.rpartition("/")[2], []).append(row)
    best = (  # kinds of answers; of as many, the smallest draft
        max(found, key=lambda row: (len(row["answers"]), -len(row["tensors"])))
        for found in by_scheme.values()
    )
    found = list(best)
    tools = tuple(f"{row['draft'].rpartition('/')[2].partition('--')[0]}--" for row in found)
    others = [
        row for row in read_rows(file) if not row["draft"].rpartition("/")[2].startswith(tools)
    ]
    write_rows(file, [*others, *found])


def write_results(out: Path, folders: int, answers: Sequence[Answer]) -> None:
    """Write both files into the folder `out`."""
    platforms = ", ".join(
        dict.fromkeys(f"{a.outcome['engine']} {a.outcome['arch']}" for a in answers)
    )
    text = _INTRODUCTION.format(folders=folders, platforms=platforms) + table(answers) + "\n"
    drawn = (out / "FOREIGN.md").read_text(encoding="utf-8").partition("\n## Folders drawn")
    (out / "FOREIGN.md").write_text(text + "".join(drawn[1:]), encoding="utf-8")
    kinds = Counter(
        (a.tool, a.outcome["engine"], a.outcome["arch"], a.outcome["tp"], a.kind) for a in answers
    )
    rows = [json.dumps([*key, count]) for key, count in sorted(kinds.items())]
    columns = json.dumps(["tool", "engine", "arch", "tp", "answer", "count"])
    (out / "foreign.json").write_text(
        f'{{"folders": {folders}, "columns": {columns}, "rows": [\n' + ",\n".join(rows) + "\n]}\n",
        encoding="utf-8",
    )
