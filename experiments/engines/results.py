"""results.json: every outcome, compactly. RESULTS.md: the same as tables to read."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from cases import Case

Outcome = Mapping[str, Any]
HERE = Path(__file__).resolve().parent
JSON_FILE = HERE / "results.json"
_NO_LINEAR = re.compile(
    r"(^|\bmodel|embed_tokens|markov_w1|confidence_head\.proj|attn|attn_m[hq]a|norm(\.\d+)?"
    r"|attention_conv|mlp_conv|candidate_selector)$"
)
"""Modules with parameters that are no linears."""
ARCHS = {"vllm": ("sm90", "sm100"), "sglang": ("sm90", "sm100", "gfx942")}
COLUMNS = [(engine, arch) for engine, archs in ARCHS.items() for arch in archs]
ENGINE_NAMES = {"vllm": "vLLM", "sglang": "SGLang"}


def write_results(out: Path, cases: Sequence[Case], outcomes: Sequence[Outcome]) -> None:
    """Write both files into the folder `out`."""
    (out / "results.json").write_text(_as_json(outcomes), encoding="utf-8")
    page = (HERE / "RESULTS.md").read_text(encoding="utf-8")  # its head is written by hand
    text = page.partition("\n## ")[0] + _as_markdown(cases, outcomes)
    (out / "RESULTS.md").write_text(text, encoding="utf-8")


def read_outcomes() -> Iterator[Outcome]:
    """What `results.json` holds: one per draft, engine, GPU and number of shards.

    `linears` are as in `with_linears`; what a loader found nothing of is left out.
    """
    read = json.loads(JSON_FILE.read_text(encoding="utf-8"))
    for row in read["outcomes"]:
        for platform, model in zip(row["on"], row["models"], strict=True):
            arch, _, tp = platform.split()
            yield {
                **row,
                "arch": arch,
                "tp": int(tp),
                "version": read["versions"][row["engine"]],
                "linears": dict(read["linears"][number] for number in read["models"][model]),
            }


def with_linears(outcome: Outcome) -> Outcome:
    """A loader's outcome, with `linears` instead of all parameters.

    They are those that the engine built, after fusion and before loading; none where it refused
    the draft before.
    """
    linears: dict[str, dict[str, Sequence[int]]] = {}
    for name, form in outcome["parameters"].items():
        module, _, parameter = name.rpartition(".")
        if not _NO_LINEAR.search(module):
            linears.setdefault(module, {})[parameter] = json.loads(form.split(" ", 1)[1])
    return {k: v for k, v in outcome.items() if k != "parameters"} | {"linears": linears}


class _Table:
    """Different values, each once; a value is known by its number."""

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}

    def number(self, value: object) -> int:
        return self.numbers.setdefault(json.dumps(value), len(self.numbers))

    def __str__(self) -> str:
        return "[\n" + ",\n".join(self.numbers) + "\n]"


def _as_json(outcomes: Sequence[Outcome]) -> str:
    """One line per different outcome of a case in an engine, with the platforms that share it.

    `schemes` is a number in the list of that name, `not_run` the kernels without their modules.
    `models` are the numbers of what was built on each platform: of lists of numbers of linears.
    """
    schemes, models, linears = _Table(), _Table(), _Table()
    lines: dict[str, dict[str, dict[str, Any]]] = {}
    for outcome in outcomes:
        line = {key: value for key, value in outcome.items() if value not in (None, [], {})}
        built = line.pop("linears", {})
        if "schemes" in line:
            line["schemes"] = schemes.number(line["schemes"])
        if "not_run" in line:
            line["not_run"] = sorted(set(line["not_run"].values()))
        platform = f"{line.pop('arch')} tp {line.pop('tp')}"
        del line["version"]
        lines.setdefault(json.dumps(line), {})[platform] = built
    rows = []
    for line, on in lines.items():  # numbers follow the lines, whoever was asked first
        numbers = [models.number([*map(linears.number, built.items())]) for built in on.values()]
        rows.append(json.dumps({**json.loads(line), "on": [*on], "models": numbers}))
    versions = {outcome["engine"]: outcome["version"] for outcome in outcomes}
    return (
        f'{{"versions": {json.dumps(versions)},\n"outcomes": [\n'
        + ",\n".join(rows)
        + f'\n],\n"schemes": {schemes},\n"models": {models},\n"linears": {linears}}}\n'
    )


def _as_markdown(cases: Sequence[Case], outcomes: Sequence[Outcome]) -> str:
    by_place = {(o["draft"], o["engine"], o["arch"], o["tp"]): o for o in outcomes}
    reasons: dict[str, int] = {}
    header = " | ".join(f"{ENGINE_NAMES[engine]} {arch}" for engine, arch in COLUMNS)
    parts = []
    for kind, title, column in (
        ("recipe", "Built-in recipes", "family and recipe"),
        ("format", "What else the layouts can store (one shard)", "family and formats"),
        ("mixed", "Several formats in one draft", "family and formats"),
        ("beyond", "The head and fc quantized as well", "family and formats"),
    ):
        parts.append(f"\n## {title}\n\n| {column} | {header} |\n|{'---|' * 6}\n")
        for case in (case for case in cases if case.kind == kind):
            cells = [_cell(case, by_place, place, reasons) for place in COLUMNS]
            label = case.name.replace("--", " ")
            parts.append(f"| {label} | {' | '.join(cells)} |\n")
    parts.append("\n## Reasons\n\n")
    parts += [f"{number}. {reason}\n" for reason, number in reasons.items()]
    return "".join(parts)


def _cell(
    case: Case, by_place: Mapping[Any, Outcome], place: tuple[str, str], reasons: dict[str, int]
) -> str:
    if case.refused is not None:
        return f"not written [{_number(f'draftquant: {case.refused}', reasons)}]"
    shards = {tp: _words(by_place[case.name, *place, tp], reasons) for tp in case.tp}
    one = shards[case.tp[0]]
    others = [f"{tp} shards: {words}" for tp, words in shards.items() if words != one]
    return "; ".join([one, *others])


def _words(outcome: Outcome, reasons: dict[str, int]) -> str:
    word = {"LOADS BUT WRONG": "**wrong**"}.get(outcome["verdict"], outcome["verdict"].lower())
    if outcome["verdict"] == "LOADS":
        return word + ("°" if outcome["not_run"] else "")
    return f"{word} [{_number(_reason(outcome), reasons)}]"


def _reason(outcome: Outcome) -> str:
    """The engine's error, or what is different in the loaded model."""
    if outcome["error"] is not None:
        where = {"after load": "after loading"}.get(outcome["stage"], f"at {outcome['stage']}")
        text, fence = outcome["error"].replace("|", "\\|"), "``" if "`" in outcome["error"] else "`"
        return f"{outcome['engine']}, {where}: {fence}{text}{fence}"
    found = (
        ("never written", outcome["unloaded"]),
        ("dropped", outcome["unread"]),
        ("cast", outcome["cast"]),
        ("one scale for several", outcome["merged"]),
    )
    return "; ".join(f"{what}: {_some(names)}" for what, names in found if names)


def _some(names: Sequence[str]) -> str:
    rest = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(f"`{name}`" for name in names[:3]) + rest


def _number(reason: str, reasons: dict[str, int]) -> int:
    return reasons.setdefault(reason, len(reasons) + 1)
