"""The forms of drafts that the engines loaded: `quantize/engines/executed_forms.json`.

Of every folder that an engine was asked for and loaded: the rows of `folder_rows`, the
published ones (`tests/wild/drafts.json`, of small sizes), and draftquant's own outputs.
`experiments/run forms` writes the file anew from the answers that are kept; `--published` asks the
engines for the published ones again, and `--cases FOLDER` takes the folders of `engines --work`.
"""

import argparse
import json
import sys
import tempfile
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "tests")]

import asking  # noqa: E402
import folder_rows  # noqa: E402
from asked_pairs import check_draft  # noqa: E402
from draftquant.quantize.engines import executed  # noqa: E402
from draftquant.quantize.engines.contract import EngineCheck  # noqa: E402
from draftquant.recipes import DraftQuantError  # noqa: E402
from predictions import predicted  # noqa: E402
from results import read_outcomes  # noqa: E402
from tiny import edit_json  # noqa: E402
from wild_drafts import shapes_of, wild_drafts  # noqa: E402

FILE = Path(executed.__file__).with_name("executed_forms.json")
PUBLISHED = HERE / "published.json"
PLATFORMS = ("vllm sm90", "sglang sm90")
_SMALL: Mapping[str, int] = {
    "intermediate_size": 512, "vocab_size": 1024, "q_lora_rank": 256, "kv_lora_rank": 128,
    "num_attention_heads": 4, "moe_intermediate_size": 128, "shared_expert_intermediate_size": 128,
    "num_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2,
    "topk_group": 1, "mask_token_id": 511, "pard_token": 511, "markov_rank": 128,
}  # fmt: skip
_DEPTH = 128
"""Layers of a target: as many as any published draft reads."""
Loaded = Iterator[EngineCheck]
"""What `check` says of folders that an engine loaded."""


def of_rows(work: Path) -> Loaded:
    """Of folders that are kept as rows."""
    files = (*folder_rows.FILES.values(), folder_rows.DRAWN_FILE)
    for number, row in enumerate(row for file in files for row in folder_rows.read_rows(file)):
        loaded = {asked.rpartition(" ")[0]: asked for asked in row["answers"].get("LOADS", ())}
        if not loaded:
            continue
        place = work / str(number)
        place.mkdir(parents=True)
        asked = {**row, "answers": {"LOADS": list(loaded.values())}}
        try:
            for _, _, said in folder_rows.predictions(asked, place):
                yield said
        except DraftQuantError:  # not read as a draft
            continue


def of_cases(folders: Path) -> Loaded:
    """Of draftquant's own outputs."""
    seen = set()
    for outcome in read_outcomes():
        folder = folders / outcome["draft"]
        one = (outcome["draft"], outcome["engine"], outcome["arch"])
        if outcome["verdict"] == "LOADS" and one not in seen and folder.is_dir():
            seen.add(one)
            yield predicted(folder, outcome)


def of_published(work: Path) -> Loaded:
    """Of published drafts, of small sizes."""
    answers = json.loads(PUBLISHED.read_text(encoding="utf-8"))
    for name, folder in _published(work, answers).items():
        for platform, told in answers.get(name, {}).items():
            engine, arch = platform.split()
            if told == "LOADS":
                yield check_draft(folder, engine=engine, arch=arch)


def _small(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config of small sizes; what a loader minds besides is left as it is."""
    found = {key: _small(v) if isinstance(v, Mapping) else v for key, v in config.items()}
    found |= {key: size for key, size in _SMALL.items() if type(found.get(key)) is int}
    heads, hidden = config.get("num_attention_heads"), config.get("hidden_size")
    if isinstance(heads, int) and isinstance(hidden, int):
        own = config.get("head_dim") or hidden // heads
        found["hidden_size"] = 4 * own if own in (64, 128) else 512
        if (kept := config.get("num_key_value_heads")) is not None:
            found["num_key_value_heads"] = 4 if kept == heads else 2
    if isinstance(wide := config.get("target_hidden_size"), int) and hidden:
        found["target_hidden_size"] = found["hidden_size"] * wide // hidden
    if isinstance(cut := config.get("draft_vocab_size"), int):
        found["draft_vocab_size"] = 1024 if cut == config.get("vocab_size", cut) else 512
    return found


def _published(work: Path, names: Collection[str]) -> dict[str, Path]:
    """Each in a folder of its own, beside a target of its sizes."""
    found = {}
    for number, draft in enumerate(each for each in wild_drafts() if each.name in names):
        place = work / str(number)
        place.mkdir(parents=True)
        found[draft.name] = replace(draft, config=_small(draft.config)).write(place / "draft")
        config = json.loads((found[draft.name] / "config.json").read_text(encoding="utf-8"))
        target = place / asking.TARGET_FOLDER
        folder_rows.write_target({"config": config, "tensors": shapes_of(draft, config)}, target)
        if "-mtp" not in draft.tensors["kind"]:
            edit_json(target / "config.json", num_hidden_layers=_DEPTH)
    return found


def ask_published(names: Collection[str]) -> dict[str, dict[str, str]]:
    """What the loaders do with these."""
    answers: dict[str, dict[str, str]] = defaultdict(dict)
    with tempfile.TemporaryDirectory() as work:
        folders = _published(Path(work), names)
        for platform in PLATFORMS:
            engine, arch = platform.split()
            outcomes = asking.loaded(engine, list(folders.values()), arch=arch)
            for name, outcome in zip(folders, outcomes, strict=True):
                answers[name][platform] = outcome["verdict"]
    return answers


def collected(loaded: Sequence[Loaded]) -> dict[str, dict[str, list[str]]]:
    """Engine -> kind of draft -> the facts of what it loaded."""
    found: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for source in loaded:
        for said in source:
            if said.form is not None:
                found[said.engine][said.form.draft] |= set(said.form.facts)
    return {
        engine: {draft: sorted(facts) for draft, facts in sorted(kinds.items())}
        for engine, kinds in sorted(found.items())
    }


def write(record: Mapping[str, Mapping[str, Sequence[str]]]) -> None:
    """A line for each kind of draft; what both engines loaded stands once."""
    both = {d: {*facts} & {*record["sglang"].get(d, ())} for d, facts in record["vllm"].items()}
    parts: dict[str, dict[str, set[str]]] = {"both": both}
    for engine, kinds in record.items():
        parts[engine] = {d: {*facts} - both.get(d, set()) for d, facts in kinds.items()}
    engines = []
    for engine, of in parts.items():
        kept = {draft: json.dumps(_kept(sorted(facts))) for draft, facts in of.items() if facts}
        lines = ",\n".join(f"{json.dumps(draft)}: {facts}" for draft, facts in kept.items())
        engines.append(f'"{engine}": {{\n{lines}\n}}')
    FILE.write_text("{" + ", ".join(engines) + "}\n", encoding="utf-8")


def _kept(facts: Sequence[str]) -> dict[str, list[str]]:
    """The facts, with what takes linears said once for all linears that it takes."""
    taken: dict[str, list[str]] = defaultdict(list)
    for fact in facts:
        module, is_of_linear, scheme = fact.partition(" as ")
        taken[module if is_of_linear else "others"].append(scheme if is_of_linear else fact)
    modules: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for module, schemes in taken.items():
        modules[tuple(schemes)].append(module)
    return {", ".join(names): list(schemes) for schemes, names in modules.items()}


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--published", nargs="+", default=[], help="names to ask the engines for")
    parser.add_argument("--cases", type=Path, help="folders of `experiments/run engines --work`")
    given = parser.parse_args()
    if given.published:
        said = json.loads(PUBLISHED.read_text(encoding="utf-8"))
        asking.write_table(PUBLISHED, said | ask_published(given.published))
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        sources: list[Any] = [of_rows(work / "rows"), of_published(work / "published")]
        sources += [of_cases(given.cases)] if given.cases else []
        write(collected(sources))
    return 0


if __name__ == "__main__":
    sys.exit(main())
