"""Dumps that are cut off, hostile, of another target or another text: each error names it."""

import dataclasses
import gzip
import io
import operator
import pickle
import sys
import zipfile
from collections.abc import Callable, Mapping, Sequence
from itertools import permutations
from pathlib import Path
from typing import Any

import corpus
import dumps
import pytest
import torch
from draftquant.calibration.dumps import dump_evidence
from draftquant.calibration.prompts.prompt_file import Prompt
from draftquant.calibration.traces.trace_folder import TraceFolder
from draftquant.quantize.files import torch_file
from draftquant.quantize.files.torch_file import TorchFileProblem, load_plain
from draftquant.recipes.errors import PromptError, TraceError
from dumps import BUILDERS, Text, import_dump, make_texts, modelopt, prompts_of, speculators, vllm
from torch import Tensor

pytestmark = pytest.mark.usefixtures("one_thread")

PAIR = corpus.PAIRS / "eagle3-llama"
TARGET, DRAFT = PAIR / "target", PAIR / "draft"


@pytest.fixture(scope="module")
def texts() -> list[Text]:
    """Eight, of 88 tokens."""
    recorded = TraceFolder.open(corpus.traces("eagle3-llama", prompts=8, max_new_tokens=40))
    return make_texts(TARGET, recorded, torch.float32)


@pytest.fixture
def not_run(monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(dump_evidence, "RUNNABLE_SHARE", 0.0)
    return TARGET


def refused(written_by: Any, dump: Path, out: Path, target: Path = TARGET, **options: Any) -> None:
    """Import, which must fail and leave nothing."""
    with pytest.raises((TraceError, PromptError), match="fix: "):
        import_dump(written_by, dump, target, out, **options)
    assert not out.exists()
    assert [path.name for path in out.parent.iterdir() if path.name.startswith(".")] == []


# ---- files


@pytest.mark.parametrize("layout", ["specforge", "speculators"])
def test_a_half_written_file(layout: str, texts: list[Text], tmp_path: Path) -> None:
    name, build = BUILDERS[layout]
    dump = build(texts[:3], tmp_path / "dump")
    files = [p for p in dump.rglob("*") if p.suffix in (".ckpt", ".gz", ".pt", ".safetensors")]
    file = sorted(files)[1]
    file.write_bytes(file.read_bytes()[:-1000])
    refused(name, dump, tmp_path / "out", prompts=prompts_of(texts))


class Runs:
    """A pickle of this class runs code when an unpickler trusts it."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path("/nowhere").exists, ())


def test_pickled_objects_are_refused(texts: list[Text], tmp_path: Path) -> None:
    file = dumps.torchspec(texts[:1], tmp_path / "dump") / "data_0.ckpt"
    torch.save({"input_ids": texts[0].token_ids, "extra": Runs()}, file)
    refused("torchspec", file.parent, tmp_path / "out")
    file.write_bytes(pickle.dumps({"input_ids": [1], "extra": Runs()}))
    refused("torchspec", file, tmp_path / "out")
    torch.save({"step": 1, "batch_idx": 0, "rank": 0, "batch": {}}, file)
    refused("torchspec", file, tmp_path / "out")


def test_a_file_that_swells_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_file, "_EXPANDED_FREE", 2**10)
    saved = io.BytesIO()
    torch.save({"input_ids": torch.zeros(2**22, dtype=torch.uint8)}, saved)
    packed = tmp_path / "data_0.ckpt.gz"
    packed.write_bytes(gzip.compress(saved.getvalue(), 1))
    with pytest.raises(TorchFileProblem, match=r"unpacks to more than .* 50 times its size"):
        load_plain(packed)
    inside = tmp_path / "data_0.ckpt"
    with zipfile.ZipFile(inside, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", bytes(2**20))
    with pytest.raises(TorchFileProblem, match="1,048,576 bytes, expected at most"):
        load_plain(inside)
    (tmp_path / "bad.ckpt.gz").write_bytes(gzip.compress(b"x" * 100)[:-12] + b"0" * 12)
    with pytest.raises(TorchFileProblem):
        load_plain(tmp_path / "bad.ckpt.gz")


def test_a_dump_without_files(tmp_path: Path) -> None:
    (tmp_path / "dump").mkdir()
    refused("vllm", tmp_path / "dump", tmp_path / "out")
    refused("specforge", tmp_path / "none", tmp_path / "out")


TOKENS, AUX, LAST = "input_ids", "aux_hidden_states", "hidden_states"
ODD: dict[str, tuple[str, Callable[[Tensor], object]]] = {
    "no tensor": (TOKENS, lambda _: [1, 2]),
    "fewer rows": (AUX, lambda x: x[:-3]),
    "a batch of texts": (TOKENS, lambda x: x.repeat(2, 1)),
    "more elements than the storage has": (AUX, lambda _: torch.zeros(1, 1).expand(88, 768)),
    "tokens beyond the vocabulary": (TOKENS, lambda x: x + 1000),
    "tokens that are no whole numbers": (TOKENS, Tensor.float),
    "features that are whole numbers": (AUX, Tensor.long),
    "last states that are whole numbers": (LAST, Tensor.long),
    "features of no layer": (AUX, torch.neg),
    "a part of a layer": (AUX, lambda x: x[:, 1:]),
    "NaN": (AUX, lambda x: x * float("nan")),
    "infinity": (LAST, lambda x: x.index_fill(0, torch.tensor([70]), -torch.inf)),
}


def test_a_file_that_is_not_what_it_should_be(texts: list[Text], tmp_path: Path) -> None:
    dump = modelopt(texts[:1], tmp_path / "dump")
    file = dump / "conversation-0.pt"
    sound = torch.load(file)
    without = {key: value for key, value in sound.items() if key != AUX}
    odd = [sound | {key: change(sound[key])} for key, change in ODD.values()]
    for content in (without, [1], *odd):
        torch.save(content, file)
        refused("modelopt", dump, tmp_path / "out")
    torch.save(sound, file)  # and a text of another run
    torch.save(sound | {AUX: sound[AUX].half()}, file.with_name("conversation-1.pt"))
    refused("modelopt", dump, tmp_path / "out")


# ---- layers

OF_LAYERS: Mapping[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "another order": ((2, 0, 1), {"draft": DRAFT}),
    "one off, as ids that count before the layer": ((1, 2, 3), {"draft": DRAFT}),
    "more than are named": ((1, 2, 3), {"aux_layer_ids": (0, 1)}),
}


@pytest.mark.parametrize("case", OF_LAYERS)
def test_layers_that_are_not_the_drafts(case: str, texts: list[Text], tmp_path: Path) -> None:
    layers, asked = OF_LAYERS[case]
    refused("modelopt", modelopt(texts[:3], tmp_path / "dump", layers), tmp_path / "out", **asked)


def test_a_target_that_is_not_run(texts: list[Text], not_run: Path, tmp_path: Path) -> None:
    """The draft settles the order of the layers, of enough positions."""
    few = modelopt(texts[:2], tmp_path / "few")
    for asked in ({}, {"draft": DRAFT}):
        refused("modelopt", few, tmp_path / "out", not_run, **asked)
    other = [dataclasses.replace(text, layers=tuple(-x for x in text.layers)) for text in texts]
    refused("modelopt", modelopt(other, tmp_path / "other"), tmp_path / "out", not_run, draft=DRAFT)
    dump = modelopt(texts, tmp_path / "dump", (2, 0, 1))
    refused("modelopt", dump, tmp_path / "out", not_run, draft=DRAFT)


def test_last_states_beside_the_others_of_a_target_that_is_not_run(
    texts: list[Text], not_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dump_evidence, "ERRORS_APART", 0.5)
    dump, asked = vllm(texts, tmp_path / "dump"), {"prompts": prompts_of(texts), "draft": DRAFT}
    report = import_dump("vllm", dump, not_run, tmp_path / "out", **asked)
    assert report.layout.last_in_aux
    assert (report.layout.layer_ids, len(report.traces)) == ((0, 1, 2), len(texts))


# ---- rows of other tokens: only whole texts show them


def late(text: Text, at: range, layers: Sequence[int] = range(4), by: int = 1) -> Text:
    """At some positions, the rows of some layers are those of earlier tokens, or 0 before them."""
    rows = torch.arange(len(text.token_ids))
    rows[at.start : at.stop] -= by
    there = (rows >= 0)[:, None]
    moved = [x[rows.clamp(min=0)] * there for x in text.layers]
    chosen = (moved[i] if i in layers else x for i, x in enumerate(text.layers))
    return dataclasses.replace(text, layers=tuple(chosen))


def stale(texts: list[Text], place: int) -> list[Text]:
    """A text has the layers of the one before, as a buffer that was not filled again."""
    filled = dataclasses.replace(texts[place], layers=texts[place - 1].layers)
    return [*texts[:place], filled, *texts[place + 1 :]]


OTHER_ROWS: dict[str, Callable[[list[Text]], list[Text]]] = {
    "late in all texts": lambda texts: [late(text, range(60, 88)) for text in texts],
    "a page of one text": lambda t: [*t[:6], late(t[6], range(40, 52), by=2), t[7]],
    "another text, which is looked at first": lambda texts: stale(texts, 1),
    "zeros of one layer": lambda t: [*t[:7], late(t[7], range(80, 88), [2], by=1000)],
}


@pytest.mark.some(2)
@pytest.mark.parametrize("case", OTHER_ROWS)
def test_rows_of_other_tokens(case: str, texts: list[Text], tmp_path: Path) -> None:
    refused("modelopt", modelopt(OTHER_ROWS[case](texts), tmp_path / "dump"), tmp_path / "out")


def test_rows_of_other_tokens_where_the_target_is_not_run(
    texts: list[Text], not_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tokens alone show them: rows of other tokens are not like theirs elsewhere."""
    monkeypatch.setattr("draftquant.calibration.dumps.dump_settling.MAX_DRAFTED", len(texts))
    monkeypatch.setattr(dump_evidence, "ERRORS_APART", 0.5)
    dump = modelopt(stale([*texts, *texts], 5), tmp_path / "dump")
    refused("modelopt", dump, tmp_path / "out", not_run, draft=DRAFT)


# ---- text


def test_text_that_the_target_did_not_write(texts: list[Text], tmp_path: Path) -> None:
    """Answers of a dataset: here prompts, which a file holds and no target said."""
    dump = modelopt([dataclasses.replace(t, start=8) for t in texts[:3]], tmp_path / "dump")
    refused("modelopt", dump, tmp_path / "out")


def test_answers_that_cannot_be_measured(texts: list[Text], tmp_path: Path) -> None:
    refused("specforge", dumps.specforge_dflash(texts, tmp_path / "dump"), tmp_path / "out")


def test_nothing_says_where_prompts_end(texts: list[Text], tmp_path: Path) -> None:
    dump = dumps.modelopt_vllm(texts, tmp_path / "dump")
    none = dumps.angelslim([dataclasses.replace(texts[0], start=1000)], tmp_path / "none")
    refused("angelslim", none, tmp_path / "out")
    refused("modelopt", dump, tmp_path / "out")
    refused("vllm", vllm(texts, tmp_path / "v"), tmp_path / "out")
    other = [Prompt(id="x", category="a", token_ids=(5, 6))]
    refused("modelopt", dump, tmp_path / "out", prompts=other)


def test_rows_at_other_positions(texts: list[Text], tmp_path: Path) -> None:
    dump = modelopt([dumps.roll(text, -1) for text in texts[:3]], tmp_path / "before")
    refused("modelopt", dump, tmp_path / "out")
    late = [dataclasses.replace(t, normed=t.normed.roll(1, 0)) for t in texts[:3]]
    refused("modelopt", modelopt(late, tmp_path / "late"), tmp_path / "out")


# ---- rows of speculators


def test_rows_of_another_dataset(texts: list[Text], tmp_path: Path) -> None:
    dump = speculators(texts[:2], tmp_path / "dump")
    states = dump / "hidden_states"
    (states / "hs_0.safetensors").rename(states / "hs_x.safetensors")
    refused("speculators", dump, tmp_path / "out")
    (states / "hs_x.safetensors").rename(states / "hs_99.safetensors")
    refused("speculators", dump, tmp_path / "out")
    (dump / "state.json").write_text('{"_data_files": [{"name": 1}]}', encoding="utf-8")
    refused("speculators", dump, tmp_path / "out")


def test_illegible_rows(texts: list[Text], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dump = speculators(texts[:2], tmp_path / "dump")
    (arrow,) = dump.glob("*.arrow")
    arrow.write_bytes(arrow.read_bytes()[:600])
    refused("speculators", dump, tmp_path / "out")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    refused("speculators", dump, tmp_path / "out")


def test_of_many_layers_the_reverse_and_every_exchange_of_two_are_tried() -> None:
    stand = tuple(range(5))
    exchanged = {o for o in permutations(stand) if sum(map(operator.ne, o, stand)) == 2}
    assert {*dump_evidence._orders(5)} == exchanged | {stand, stand[::-1]}
    assert {*dump_evidence._orders(4)} == {*permutations(range(4))}
