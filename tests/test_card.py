"""Model cards: what the Hub's own parser reads of them, and what hostile names do to them."""

import dataclasses
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import corpus
import pytest
from draftquant.quantize.files.card_text import (
    BEGIN,
    END,
    code,
    code_block,
    inherited,
    prose,
    table,
)
from draftquant.quantize.verify.verification import verify
from draftquant.recipes.errors import CardError, CheckpointError, GateError, MeasureError, visible
from draftquant.scripts.cli import main
from draftquant.validate.report import CardRequest
from draftquant.validate.report.model_card import check_served, model_card, read_gate, section
from handmade_measurements import measurement, written
from huggingface_hub import ModelCard
from markdown_it import MarkdownIt
from tiny import edit_json
from told import check_told, normal
from verify_cases import edit, flip_bit, reseal

PAIR = Path(__file__).parent / "pairs" / "eagle3-llama"
EVIL = "\x1b[31m|`<img src=x onerror=a>`](https://evil)**\u202e\n---\n# evil"
OUR_CARD = ["--base-model", "someone/draft", "--license", "mit"]

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shipped draft in INT4 at `out`, and the gate's report on it at `gate.json`."""
    folder = tmp_path_factory.mktemp("card")
    shutil.copytree(corpus.quantized("eagle3-llama", "int4-channel", pair=True), folder / "out")
    traces = corpus.traces("eagle3-llama", prompts=40)
    asked = ["--traces", str(traces), "--report", str(folder / "gate.json")]
    assert main(["gate", str(PAIR / "draft"), str(folder / "out"), *asked]) in (0, 1, 3)
    return folder


@pytest.fixture
def out(work: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(work / "out", tmp_path / "out"))


def parsed(text: str) -> Mapping[str, Any]:
    """The front matter as the Hub reads it."""
    found: Mapping[str, Any] = ModelCard(text).data.to_dict()
    return found


def cells(text: str) -> list[list[str]]:
    """The rows of all tables of a card, as a reader sees them."""
    rows: list[list[str]] = []
    for token in MarkdownIt("commonmark").enable("table").parse(ModelCard(text).text):
        if token.type == "tr_open":
            rows.append([])
        elif token.type == "inline" and rows and token.level >= 4:
            rows[-1].append("".join(child.content for child in token.children or []))
    return rows


def test_verify_demands_the_card_and_takes_any(out: Path) -> None:
    source = PAIR / "draft"
    (out / "README.md").write_text("another one", encoding="utf-8")
    assert verify(out, source).ok
    (out / "README.md").unlink()
    (fault,) = verify(out, source).faults
    assert str(fault) == "README.md: expected the model card that was written, got none"


def test_writing_the_card_keeps_what_others_wrote(out: Path, tmp_path: Path) -> None:
    readme = out / "README.md"
    front, text = readme.read_text(encoding="utf-8").split(BEGIN)
    readme.write_text(f"{front}A word before.\n\n{BEGIN}{text}\nA word behind.\n", encoding="utf-8")
    arguments = ["card", str(out), *OUR_CARD, "--out", str(readme)]
    assert main(arguments) == 2
    assert main([*arguments, "--overwrite"]) == 0
    first = readme.read_text(encoding="utf-8")
    assert first.split(BEGIN)[0].endswith("\nA word before.\n\n")
    assert first.endswith(f"{END}\nA word behind.\n")
    assert main([*arguments, "--overwrite"]) == 0
    assert readme.read_text(encoding="utf-8") == first
    assert verify(out, PAIR / "draft").ok
    assert [path.name for path in out.iterdir() if path.name.startswith(".")] == []
    other = tmp_path / "card.md"
    assert main([*arguments[:-1], str(other)]) == 0
    assert other.read_text(encoding="utf-8") == first


@pytest.mark.parametrize(
    "request_",
    [
        CardRequest(license="mit"),
        CardRequest(base_model="a/b"),
        CardRequest(base_model="a/b", license="MIT\nx: y"),
        CardRequest(base_model="evil: x", license="mit"),
        CardRequest(base_model="a/b", license="mit", name="a b"),
    ],
)
def test_what_a_card_needs(work: Path, request_: CardRequest) -> None:
    with pytest.raises(CardError):
        model_card(work / "out", request_)


REQUEST = CardRequest(base_model="a/b", license="mit")


@pytest.mark.parametrize("front", ["a: [", "license: 2024-13-45", "- license"])
def test_a_front_matter_that_nobody_can_read_has_no_keys(front: str) -> None:
    assert inherited(f"---\n{front}\n---\n") == {}


def test_keys_of_the_hub_are_kept(out: Path) -> None:
    """Those that say nothing about the weights; another license replaces what is said of one."""
    license = {"license": "other", "license_name": "mine", "license_link": "https://a/b"}
    other = {"language": ["en"], "pipeline_tag": "text-generation", "library_name": "vllm"}
    front = json.dumps(license | other | {"datasets": "a/b"})
    (out / "README.md").write_text(f"---\n{front}\n---\n", encoding="utf-8")
    found = parsed(model_card(out, CardRequest(base_model="a/b")))
    assert {**license, **other}.items() <= found.items()
    assert "datasets" not in found
    found = parsed(model_card(out, REQUEST))
    assert {"license": "mit", **other}.items() <= found.items()
    assert not {"license_name", "license_link"} & found.keys()


def test_folders_that_have_no_card(out: Path) -> None:
    edit_json(out / "draftquant.json", argv=["draftquant"])
    with pytest.raises(CheckpointError, match="sha256: not that of the other keys"):
        model_card(out, REQUEST)
    reseal(out)
    edit(out, lambda t: t.update({"norm.weight": flip_bit(t["norm.weight"], 3)}))
    with pytest.raises(CheckpointError, match="its tensors are not those that "):
        model_card(out, REQUEST)


def test_a_draft_only_cut_has_a_card_which_a_quantized_one_does_not_keep(tmp_path: Path) -> None:
    draft, out = PAIR.parent / "smollm2/draft", tmp_path / "out"
    text = model_card(draft, REQUEST)
    assert parsed(text)["tags"][2:] == ["cut", "draftquant", "eagle3-llama"]
    assert "base_model_relation" not in parsed(text)
    first = cells(text)[:4]
    assert first[3] == ["cut", "vocabulary 4,096 of 49,152"]
    assert "Vocabulary 4,096 of 49,152, by tokens by how often the target said them" in text
    assert "Recipe" not in text
    assert main(["quantize", str(draft), "--recipe", "fp8-ptpc", "--out", str(out)]) == 0
    made = (out / "README.md").read_text(encoding="utf-8")
    check_told("least_card", {"quantized": normal(made, exact=True)})


def test_reports_that_are_none_or_of_another_draft(work: Path, tmp_path: Path) -> None:
    report = json.loads((work / "gate.json").read_text(encoding="utf-8"))
    path = tmp_path / "gate.json"
    for text in ("[]", "{}", "{", json.dumps(report | {"verdict": "GOOD"}),
                 json.dumps(report | {"num_prompts": "many"}),
                 json.dumps(report | {"parity": []}),
                 json.dumps({"verdict": "PASS", "against": 1})):  # fmt: skip
        path.write_text(text, encoding="utf-8")
        with pytest.raises(GateError, match=r"is no report of the gate: .*\n  fix: "):
            read_gate(path, "00")
    with pytest.raises(GateError, match="cannot be read"):
        read_gate(tmp_path / "none.json", "00")
    with pytest.raises(CardError, match=r"judges a draft whose tensors are [0-9a-f]{12}, expected"):
        read_gate(work / "gate.json", "00" * 32)
    candidate = report["background"]["candidate_sha256"]
    for role in ("candidate", "baseline"):
        nameless = report["background"] | {f"{role}_sha256": None}
        path.write_text(json.dumps(report | {"background": nameless}), encoding="utf-8")
        with pytest.raises(CardError, match="does not know which drafts it judges"):
            read_gate(path, candidate)


def test_hostile_names_do_not_leave_their_place(work: Path, tmp_path: Path) -> None:
    report = json.loads((work / "gate.json").read_text(encoding="utf-8"))
    first = report["categories"][0]["category"]
    report["categories"][0]["category"] = EVIL  # and the first by name, too
    for prompt in report["prompts"]:
        prompt["category"] = EVIL if prompt["category"] == first else prompt["category"]
    report["reason"] = report["warnings"][0] = EVIL
    report["traces"]["target"]["name"] = EVIL
    path = tmp_path / "gate.json"
    path.write_text(json.dumps(report), encoding="utf-8")
    honest, text = (
        model_card(work / "out", dataclasses.replace(REQUEST, gate=gate))
        for gate in (work / "gate.json", path)
    )
    assert "\x1b" not in text
    assert "\u202e" not in text
    assert parsed(text) == parsed(honest)
    assert [len(row) for row in cells(text)] == [len(row) for row in cells(honest)]
    markdown = MarkdownIt("commonmark").enable("table")
    kinds = [{token.type for token in markdown.parse(card)} for card in (honest, text)]
    assert kinds[0] == kinds[1]
    shown = markdown.render(ModelCard(text).text)
    assert "<img" not in shown
    assert "<a " not in shown
    assert "onerror" in shown  # it is shown, as text


@pytest.mark.parametrize(
    "text", [EVIL, "a``b", " | a", "*a*", "1. a", "- a", "---", "# a", "&lt;", "a\\", "    a"]
)
def test_foreign_text_shows_as_it_is(text: str) -> None:
    parser = MarkdownIt("commonmark").enable(["table", "strikethrough"])
    wanted = visible(text)

    def shown(markdown: str) -> str:
        rows = [t for t in parser.parse(table(("a", "b"), [("x", markdown)])) if t.children]
        assert len(rows) == 4
        return "".join(child.content for child in rows[-1].children or [])

    assert shown(prose(text)) == wanted.strip()
    assert shown(code(text)).strip() == wanted.strip()
    tokens = parser.parse(prose(text))
    assert [token.type for token in tokens] == ["paragraph_open", "inline", "paragraph_close"]
    assert "".join(child.content for child in tokens[1].children or []) == wanted.strip()
    assert [t.type for t in parser.parse(code_block(text))] == ["fence"]


# ---- on a server

ROUNDS = [[1, 0, 1, 1], [1, 1, 1, 0]]


def test_what_servers_accepted(work: Path, tmp_path: Path) -> None:
    report = json.loads((work / "gate.json").read_text(encoding="utf-8"))
    identity = report["background"]["candidate_sha256"]
    run = measurement(ROUNDS, draft_sha256=identity, model=visible(EVIL), lossy=("a = b",))
    asked = {"measurement": run, "speculation": check_served(run, identity)}
    text = section("card_served.md.j2", **asked)
    assert "Its acceptance rule is lossy, so that its outputs differ from those of" in text
    assert "<img" not in MarkdownIt("commonmark").enable("table").render(text)
    path = tmp_path / "run.jsonl"
    plain = measurement(ROUNDS, draft_sha256=identity)
    written(path, plain)
    request = CardRequest(base_model="a/b", license="mit", measured=[path])
    assert ["all requests", "2", "16", "1.7500", "", ""] in cells(model_card(work / "out", request))
    profile = tmp_path / "speculation_profile.json"
    card = ["card", str(work / "out"), *OUR_CARD, "--profile", str(profile)]
    lengths = []
    for by in (["--measured", str(path)], ["--gate", str(work / "gate.json"), "--overwrite"]):
        assert main([*card, *by]) == main(["golden", str(tmp_path)]) == 0
        lengths.append(json.loads(profile.read_text(encoding="utf-8"))["mean_accept_length"])
    assert lengths == [1.75, round(report["candidate"]["mean_acceptance_length"], 6)]
    for more in ([], ["--overwrite"], ["--profile", "p.txt"]):
        assert main([*card, *more]) == 2
    written(path, dataclasses.replace(plain, records=()))
    with pytest.raises(MeasureError, match="holds no record"):
        model_card(work / "out", request)


def test_measurements_that_are_not_of_this_draft() -> None:
    run = measurement(ROUNDS)
    plain = dataclasses.replace(run, setup=dataclasses.replace(run.setup, speculation=None))
    with pytest.raises(CardError, match="the measured server used no draft"):
        check_served(plain, "00")
    with pytest.raises(CardError, match=r"is of a draft whose tensors are abc, expected 00"):
        check_served(measurement(ROUNDS, draft_sha256="abc"), "00")
    with pytest.raises(CardError, match="does not know which draft was served"):
        check_served(measurement(ROUNDS, draft_sha256=None), "00")
