"""Data sets of the Hub as prompts, found in a local cache without a network."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import datasets
import huggingface_hub.constants
import pytest
from draftquant.calibration.prompts.prompt_file import PromptEncoder, read_prompts
from draftquant.calibration.prompts.prompt_forms import ChosenPrompts
from draftquant.calibration.prompts.prompt_source import ReadPrompts, chosen_prompts
from draftquant.calibration.traces.manifest import DatasetSource
from draftquant.calibration.traces.sets import merge_traces
from draftquant.calibration.traces.trace_folder import TraceFolder
from draftquant.quantize.files.hub import resolve_draft
from draftquant.recipes.errors import CheckpointError, DraftQuantWarning, PromptError, visible
from draftquant.scripts import cli
from local_http import Quiet, listening
from test_prompts import PAIR, chat_target
from tiny import tiny_eagle3_llama

COMMIT = "0123456789abcdef0123456789abcdef01234567"
CONFIGS = """---
configs:
- config_name: easy
  data_files:
  - {split: train, path: easy.jsonl}
- config_name: hard
  data_files:
  - {split: train, path: train.jsonl}
  - {split: test, path: test.jsonl}
---
"""


def dataset(
    home: Path, name: str, files: Mapping[str, Sequence[Mapping[str, Any]]], *, readme: str = ""
) -> None:
    """As `hf download --repo-type dataset` leaves one in the cache of the Hub."""
    folder = home / "hub" / f"datasets--{name.replace('/', '--')}"
    snapshot = folder / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (folder / "refs").mkdir(exist_ok=True)
    (folder / "refs" / "main").write_text(COMMIT, encoding="utf-8")
    (snapshot / "README.md").write_text(readme, encoding="utf-8")
    for file, rows in files.items():
        lines = "".join(f"{json.dumps(row)}\n" for row in rows)
        (snapshot / file).write_text(lines, encoding="utf-8")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """HF_HOME of a machine without a network."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")
    return tmp_path


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> PromptEncoder:
    return PromptEncoder(chat_target(tmp_path_factory.mktemp("chat") / "target"))


def questions(*, count: int = 4, **more: object) -> list[dict[str, Any]]:
    return [{"question": f"{i} plus {i}?", "answer": f"{2 * i}", **more} for i in range(count)]


def taken(reference: str, encoder: PromptEncoder, **choice: Any) -> ReadPrompts:
    names = {key: key if key == "num_prompts" else f"prompts_{key}" for key in choice}
    asked = ChosenPrompts(**{names[key]: value for key, value in choice.items()})
    return chosen_prompts(reference, encoder, asked)


USER, ANSWER = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}
HI = [USER]


def test_config_and_split(home: Path, encoder: PromptEncoder) -> None:
    rows = {name: questions(count=n) for name, n in (("easy", 1), ("train", 2), ("test", 3))}
    dataset(home, "a/b", {f"{name}.jsonl": found for name, found in rows.items()}, readme=CONFIGS)
    read = taken("a/b", encoder, split="hard/test")
    assert [prompt.id for prompt in read.prompts] == ["row-0", "row-1", "row-2"]
    assert str(read.dataset) == "a/b@0123456789ab, hard/test, all rows"
    assert len(taken("a/b", encoder, split="easy/").prompts) == 1
    for split in (None, "none/test", "hard/", "hard/dev"):
        with pytest.raises(PromptError, match="fix: name one: --prompts-split "):
            taken("a/b", encoder, split=split)


def test_more_prompts_contain_fewer(home: Path, encoder: PromptEncoder) -> None:
    dataset(home, "a/b", {"train.jsonl": questions(count=40)})
    few, many, other = (
        taken("a/b", encoder, num_prompts=number, seed=seed)
        for number, seed in ((5, 0), (12, 0), (12, 1))
    )
    names = [[prompt.id for prompt in read.prompts] for read in (few, many, other)]
    assert list(map(len, names)) == [5, 12, 12]
    assert set(names[0]) < set(names[1])
    assert set(names[1]) != set(names[2])
    assert few.dataset is not None
    assert few.dataset.seed == 0
    assert names[0] == sorted(names[0], key=lambda name: int(name.removeprefix("row-")))
    # Who records and who measures must draw the same: these places never change.
    assert ChosenPrompts(num_prompts=1).order(5) == [4, 0, 2, 1, 3]
    with pytest.raises(PromptError):
        taken("a/b", encoder, num_prompts=50)


def test_files_are_drawn_from_too(tmp_path: Path, encoder: PromptEncoder) -> None:
    path = tmp_path / "prompts.jsonl"
    rows = [{"id": f"p{i}", "ask": f"Hi {i}", "category": "c"} for i in range(20)]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    choice = ChosenPrompts(num_prompts=6, prompts_column="ask")
    read = read_prompts(path, encoder=encoder, choice=choice)
    assert [prompt.id for prompt in read] == [f"p{i}" for i in sorted(choice.order(20)[:6])]
    assert {prompt.category for prompt in read} == {"c"}
    with pytest.raises(PromptError):
        read_prompts(path, encoder=encoder, choice=ChosenPrompts(num_prompts=21))
    with pytest.raises(PromptError):
        taken(str(path), encoder, split="test")


def test_a_column_by_name(home: Path, encoder: PromptEncoder) -> None:
    row = {"ask": "Hi", "turns_of_user": ["Hi", "more"], "chat": [*HI, ANSWER], "n": 3}
    row |= {"cluster": "manual.md", "category": 5}
    dataset(home, "a/b", {"train.jsonl": [row]})
    for column in ("ask", "turns_of_user", "chat"):
        read = taken("a/b", encoder, column=column)
        assert read.prompts[0].token_ids == tuple(encoder.messages(HI)), column
        assert read.prompts[0].cluster == "manual.md"
        assert f"column {column}" in str(read.dataset)
    for column in ("query", "n", None):  # one that is not there, one of numbers, none
        with pytest.raises(PromptError):
            taken("a/b", encoder, column=column)


def test_rows_without_a_prompt_are_passed_over(home: Path, encoder: PromptEncoder) -> None:
    rows = [{"prompt": text, "cluster": 7} for text in ("Hi", None, "more", None, "again")]
    dataset(home, "a/b", {"train.jsonl": rows})
    with pytest.warns(DraftQuantWarning, match=r"2 row\(s\) hold no prompt: row 1: exp"):
        read = taken("a/b", encoder)
    assert [prompt.id for prompt in read.prompts] == ["row-0", "row-2", "row-4"]
    assert len(taken("a/b", encoder, num_prompts=3).prompts) == 3
    with pytest.raises(PromptError):
        taken("a/b", encoder, num_prompts=4)


def test_a_large_data_set_asks_how_many(
    home: Path, encoder: PromptEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("draftquant.calibration.prompts.prompt_source.MOST_ROWS", 3)
    dataset(home, "a/b", {"train.jsonl": questions()})
    with pytest.raises(PromptError):
        taken("a/b", encoder)


def test_what_is_not_in_the_cache(home: Path, encoder: PromptEncoder) -> None:
    with pytest.raises(PromptError):
        taken("a/none", encoder)
    dataset(home, "a/b", {})
    with pytest.raises(PromptError):
        taken("a/b", encoder)


class Refusing(Quiet):
    """A Hub that says no, in its own words."""

    said: tuple[int, str]

    def answered(self) -> None:
        self.answer(self.said[0], b"", {"X-Error-Code": self.said[1]})


@pytest.mark.usefixtures("home")
def test_a_hub_that_refuses(encoder: PromptEncoder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    for said in ((403, "GatedRepo"), (404, "RepoNotFound"), (404, "RevisionNotFound")):
        with listening(type("Handler", (Refusing,), {"said": said})) as address:
            monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", address)
            with pytest.raises(PromptError):
                taken("a/b@v1", encoder)


def test_record_says_where_its_prompts_come_from(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"token_ids": [5 + i, 6, 7]} for i in range(9)]
    dataset(home, "a/b", {"train.jsonl": [*rows, {"token_ids": None}]})
    first = ["record", "--target", str(PAIR / "target"), "--draft", str(PAIR / "draft")]
    first += ["--prompts", "a/b", "--max-new-tokens", "2"]
    for number, out in ((4, "few"), (9, "many")):
        assert cli.main([*first, "--num-prompts", str(number), "--out", str(tmp_path / out)]) == 0
    said = capsys.readouterr().err
    assert "Repo card" not in said
    assert "4 prompts of a/b@0123456789ab, default/train, rows drawn with seed 0" in said
    assert "warning: a/b: 1 row(s) hold no prompt: row 9: expected one of token_ids" in said
    few, many = (TraceFolder.open(tmp_path / out) for out in ("few", "many"))
    source = DatasetSource(name="a/b", revision=COMMIT, config="default", split="train", seed=0)
    assert few.manifest.datasets == many.manifest.datasets == (source,)
    names = [{entry.id for entry in traces.manifest.prompts} for traces in (few, many)]
    assert names[0] < names[1]
    merged = merge_traces([few, many], tmp_path / "merged").traces
    assert merged.manifest.datasets == (source,)
    assert cli.main(["traces", "info", str(merged.folder)]) == 0
    assert f"prompts of the data set {source}" in capsys.readouterr().out


# ---- drafts from the Hub: a real download from a server on loopback, and Hubs that do not answer


REPOSITORY = "someone/tiny-draft"


class Hub(Quiet):
    """The routes that snapshot_download uses: revision, tree and file."""

    folder: Path
    asked: ClassVar[list[str]] = []

    def answered(self) -> None:
        path = self.path.partition("?")[0]
        self.asked.append(path)
        names = sorted(file.name for file in self.folder.iterdir())
        api = f"/api/models/{REPOSITORY}"
        if path in (f"{api}/revision/main", f"{api}/revision/v1"):
            self._json(
                {"id": REPOSITORY, "sha": COMMIT, "siblings": [{"rfilename": n} for n in names]}
            )
        elif path == f"{api}/tree/{COMMIT}":
            sizes = {name: (self.folder / name).stat().st_size for name in names}
            self._json([{"type": "file", "path": n, "size": sizes[n], "oid": n} for n in names])
        elif path.rpartition("/")[0] == f"/{REPOSITORY}/resolve/{COMMIT}":
            self._send((self.folder / path.rpartition("/")[2]).read_bytes())
        else:
            self._send(b"", status=404)

    def _json(self, value: object) -> None:
        self._send(json.dumps(value).encode())

    def _send(self, body: bytes, status: int = 200) -> None:
        tag = f'"{hash(body) & 0xFFFFFFFF:x}"'
        self.answer(status, body, {"X-Repo-Commit": COMMIT, "ETag": tag})


def test_download_pins_the_commit(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    served = tiny_eagle3_llama(home / "served")
    Hub.asked.clear()
    constants = huggingface_hub.constants
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with listening(type("Served", (Hub,), {"folder": served})) as address:
        files = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants.ENDPOINT, address)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", files)
        monkeypatch.setattr(constants, "ENDPOINT", address)
        found = resolve_draft(f"{REPOSITORY}@v1")
    assert f"/api/models/{REPOSITORY}/revision/v1" in Hub.asked
    assert (found.hub_id, found.revision) == (REPOSITORY, COMMIT)
    contents = [{path.name: path.read_bytes() for path in folder.iterdir()}
                for folder in (found.folder, served)]  # fmt: skip
    assert contents[0] == contents[1]


@pytest.mark.usefixtures("home")
def test_no_network() -> None:
    with pytest.raises(CheckpointError, match="HF_HUB_OFFLINE forbids a download: "):
        resolve_draft(REPOSITORY)


NO_IDS = ("nonsense", "a/b/c", "/absent/folder", "owner/name@", "../x", "a b/c", "\n")
FORBIDDEN = ("owner--x/name", "owner/na..me", "ä/b", "owner/name.git")


@pytest.mark.parametrize("reference", [*NO_IDS, *FORBIDDEN])
def test_what_is_no_hub_id(reference: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(CheckpointError) as caught:
        resolve_draft(reference)
    assert caught.value.where == visible(reference)
