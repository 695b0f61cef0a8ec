"""Dumps of every trainer become the traces that our own recorder writes."""

import dataclasses
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from draftquant.calibration.dumps.dump_answers import Answers
from draftquant.calibration.dumps.dump_layouts import Sample
from draftquant.calibration.prompts.prompt_file import Prompt, read_prompts
from draftquant.calibration.traces.manifest import FeatureDtype
from draftquant.calibration.traces.target_tables import TargetTables
from draftquant.calibration.traces.trace_folder import TraceFolder
from draftquant.quantize.stored.loading import LoadedDraft, load_draft
from draftquant.quantize.stored.stored_tables import EMBEDDING, HEAD
from draftquant.validate.counting.trace_replay import replay_drafts
from dumps import (
    BUILDERS,
    Text,
    angelslim_dflash,
    import_dump,
    make_texts,
    modelopt,
    modelopt_vllm,
    prompts_of,
    specforge,
    specforge_dflash,
    torchspec,
    vllm,
)
from recorded import record_traces
from vendors import needs

pytestmark = pytest.mark.usefixtures("one_thread")

PAIR = Path(__file__).parent / "pairs" / "eagle3-llama"
TARGET = PAIR / "target"
NUM_PROMPTS, NEW_TOKENS = 10, 40
ROUNDING = {torch.float32: 2e-4, torch.bfloat16: 0.5}
"""Of features up to 192: one pass over a text and token by token add up in another order."""


def record(out: Path, dtype: FeatureDtype) -> TraceFolder:
    """By our own recorder; half of the prompts are shorter, as texts of a batch are."""
    prompts = [
        dataclasses.replace(prompt, token_ids=prompt.token_ids[: 48 - 8 * (i % 2)])
        for i, prompt in enumerate(read_prompts(PAIR / "prompts.jsonl")[:NUM_PROMPTS])
    ]
    return record_traces(
        TARGET, prompts, out, max_new_tokens=NEW_TOKENS, aux_layer_ids=(0, 1, 2), dtype=dtype
    )


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> TraceFolder:
    return record(tmp_path_factory.mktemp("recorded") / "traces", "float32")


@pytest.fixture(scope="module")
def texts(recorded: TraceFolder) -> list[Text]:
    return make_texts(TARGET, recorded, torch.float32)


@pytest.fixture(scope="module")
def draft() -> LoadedDraft:
    return load_draft(PAIR / "draft")


@pytest.fixture
def config_alone(tmp_path: Path) -> Path:
    """A target that cannot be run, nor its head be read."""
    folder = tmp_path / "config"
    folder.mkdir()
    shutil.copy(TARGET / "config.json", folder)
    return folder


@pytest.fixture
def not_run(monkeypatch: pytest.MonkeyPatch) -> Path:
    """A target with its head that is too large to run here."""
    monkeypatch.setattr("draftquant.calibration.dumps.dump_evidence.RUNNABLE_SHARE", 0.0)
    return TARGET


def counts(draft: LoadedDraft, traces: TraceFolder) -> list[tuple[int, ...]]:
    (replay,) = replay_drafts([draft], traces, num_draft_tokens=3)
    return [prompt.counts.histogram for prompt in replay.prompts]


def largest_difference(ours: TraceFolder, theirs: TraceFolder) -> float:
    pairs = zip(ours, theirs, strict=True)
    return max(
        float((a.features[: len(b.features)].float() - b.features.float()).abs().max())
        for a, b in pairs
    )


@pytest.mark.parametrize("name", BUILDERS)
def test_an_imported_dump_is_what_our_recorder_writes(
    name: Any, recorded: TraceFolder, texts: list[Text], draft: LoadedDraft, tmp_path: Path
) -> None:
    """The same tokens and target, features up to rounding, and equal counts on replay."""
    dump = BUILDERS[name](texts, tmp_path / "dump", (0, 1, 2))
    without_mask = name == "vllm"
    report = import_dump(
        name,
        dump,
        TARGET,
        tmp_path / "out",
        draft=PAIR / "draft",
        prompts=prompts_of(recorded) if without_mask else None,
    )
    traces = report.traces
    assert report.num_samples == NUM_PROMPTS
    assert (report.num_off_policy, report.num_without_answer) == (0, 0)
    assert traces.manifest.target == recorded.manifest.target
    assert traces.manifest.features == recorded.manifest.features
    assert traces.manifest.recorded_by == f"dump of {name}"
    for ours, theirs in zip(recorded, traces, strict=True):
        kept = ours.num_tokens - without_mask  # the last token was never read
        assert torch.equal(theirs.token_ids, ours.token_ids[:kept])
        assert theirs.prompt_length == ours.prompt_length
    assert largest_difference(recorded, traces) <= ROUNDING[torch.float32]
    assert report.layout.recomputed is not None
    assert report.layout.recomputed.difference < 0.01
    assert report.layout.head is not None
    assert report.layout.head.share > 0.99
    before = name in ("torchspec", "speculators", "vllm")
    assert report.layout.head.norm == f"{'before' if before else 'after'} the last norm"
    if not without_mask:
        assert counts(draft, traces) == counts(draft, recorded)


def test_a_dump_in_bfloat16(draft: LoadedDraft, tmp_path: Path) -> None:
    """Rounding breaks ties of the draft in another way here and there: nothing more."""
    ours = record(tmp_path / "ours", "bfloat16")
    texts = make_texts(TARGET, ours, torch.bfloat16)
    report = import_dump("modelopt", modelopt(texts, tmp_path / "dump"), TARGET, tmp_path / "out")
    assert report.traces.manifest.features == ours.manifest.features
    assert largest_difference(ours, report.traces) <= ROUNDING[torch.bfloat16]
    pairs = zip(counts(draft, ours), counts(draft, report.traces), strict=True)
    assert sum(a == b for a, b in pairs) >= NUM_PROMPTS - 1


def test_a_prompt_file_gives_ids_and_categories(
    recorded: TraceFolder, texts: list[Text], tmp_path: Path
) -> None:
    """And where prompts end, where the mask is all ones, as ModelOpt's without answer-only loss."""
    dump = modelopt_vllm(texts, tmp_path / "dump")
    prompts = prompts_of(recorded)
    traces = import_dump("modelopt", dump, TARGET, tmp_path / "out", prompts=prompts).traces
    assert [(t.id, t.category, t.prompt_length) for t in traces] == [
        (t.id, t.category, t.prompt_length) for t in recorded
    ]


def test_a_sample_belongs_to_the_longest_prompt_that_it_begins_with() -> None:
    """One prompt may begin with another, as a turn with those before it."""
    short, long = (
        Prompt(id=name, category=name, token_ids=ids)
        for name, ids in (("short", (5, 6)), ("long", (5, 6, 7, 8)))
    )
    tokens = torch.tensor([5, 6, 7, 8, 9, 3])
    sample = Sample(
        id="0", file=Path("0"), token_ids=tokens, answered=None, aux=torch.zeros(6, 1), last=None
    )
    for prompts in ([short, long], [long, short]):
        (answer,) = Answers([3], prompts).of(sample)
        assert (answer.id, answer.category, answer.start) == ("long", "long", 4)


def test_the_order_of_files_is_that_of_their_numbers(texts: list[Text], tmp_path: Path) -> None:
    traces = import_dump(
        "specforge", specforge([*texts, *texts[:2]], tmp_path / "dump"), TARGET, tmp_path / "out"
    ).traces
    assert [trace.id for trace in traces] == [f"rows_0-2000/data_{i}" for i in range(12)]


def test_tables_are_carried(texts: list[Text], tmp_path: Path) -> None:
    dump = torchspec(texts, tmp_path / "dump")
    traces = import_dump(
        "torchspec", dump, TARGET, tmp_path / "out", tables=True, table_ids=(0,)
    ).traces
    shared = traces.tables()
    assert torch.equal(shared[HEAD], TargetTables.find(TARGET).shared()[HEAD])
    assert not bool(shared[EMBEDDING][0].isnan().any())


# ---- conversations: each run of the mask is an answer


def test_every_answer_of_a_conversation_is_a_trace(texts: list[Text], tmp_path: Path) -> None:
    """A mask with a hole: two answers, the second with all before it as its prompt."""
    holed = [dataclasses.replace(text) for text in texts]
    dump = modelopt(holed, tmp_path / "dump")
    file = dump / "conversation-0.pt"
    saved = torch.load(file)
    start = texts[0].start
    saved["loss_mask"][start + 10 : start + 15] = 0
    torch.save(saved, file)
    traces = list(import_dump("modelopt", dump, TARGET, tmp_path / "out").traces)
    first, second, third = traces[:3]
    assert (first.id, first.prompt_length, first.num_tokens) == (
        "conversation-0/turn-1", start, start + 10,
    )  # fmt: skip
    assert (second.id, second.prompt_length) == ("conversation-0/turn-2", start + 15)
    assert second.num_tokens == len(texts[0].token_ids)
    assert second.conversation_sha256 == first.prompt_sha256 == second.cluster_sha256
    assert first.conversation_sha256 is None
    assert third.id == "conversation-1"
    assert torch.equal(second.features[: len(first.features)], first.features)


def test_an_answer_ends_with_the_end_of_text(texts: list[Text], tmp_path: Path) -> None:
    """What the template puts behind it is in some masks, and is none of the target's words."""
    text = texts[0]
    end = text.start + 20
    tokens = text.token_ids.clone()
    tokens[end] = 0  # <|endoftext|>
    dump = modelopt([dataclasses.replace(text, token_ids=tokens), *texts[1:]], tmp_path / "dump")
    traces = import_dump(
        "modelopt", dump, TARGET, tmp_path / "out", leave_out_off_policy=True
    ).traces
    assert traces.manifest.prompts[0].id == "conversation-1"  # it did not say the end itself
    short = next(iter(traces))
    assert short.num_tokens == len(texts[1].token_ids)


def test_texts_without_an_answer_are_counted(texts: list[Text], tmp_path: Path) -> None:
    dump = modelopt(texts, tmp_path / "dump")
    file = dump / "conversation-3.pt"
    saved = torch.load(file)
    torch.save(saved | {"loss_mask": torch.zeros_like(saved["loss_mask"])}, file)
    report = import_dump("modelopt", dump, TARGET, tmp_path / "out")
    assert (report.num_without_answer, len(report.traces)) == (1, NUM_PROMPTS - 1)


# ---- what settles the conventions


def test_rows_behind_their_tokens_are_put_back(
    recorded: TraceFolder, texts: list[Text], tmp_path: Path
) -> None:
    late = [roll(text, 1) for text in texts]
    report = import_dump("modelopt", modelopt(late, tmp_path / "dump"), TARGET, tmp_path / "out")
    assert report.layout.shift == -1
    assert (
        "the rows were shifted by 1 against their tokens, and were moved back"
        in report.layout.sentences()
    )
    assert largest_difference(recorded, report.traces) <= ROUNDING[torch.float32]


def roll(text: Text, by: int) -> Text:
    return dataclasses.replace(
        text,
        layers=tuple(layer.roll(by, 0) for layer in text.layers),
        normed=text.normed.roll(by, 0),
    )


def test_the_draft_settles_the_layers_of_a_target_that_is_not_run(
    texts: list[Text], not_run: Path, tmp_path: Path
) -> None:
    dump = modelopt(texts, tmp_path / "dump")
    report = import_dump("modelopt", dump, not_run, tmp_path / "out", draft=PAIR / "draft")
    steps = report.layout.draft
    assert report.layout.recomputed is None
    assert steps is not None
    assert steps.accepted > 0.7
    assert steps.accepted > steps.next_best + 0.02
    assert "do not fit into" in " ".join(report.layout.sentences())
    identity = report.traces.manifest.target
    assert (identity.num_layers, identity.weights_sha256) == (4, None)


def test_a_config_alone_will_do_with_a_draft_and_a_word(
    texts: list[Text], config_alone: Path, tmp_path: Path
) -> None:
    late = [roll(text, 1) for text in texts]
    report = import_dump(
        "specforge",
        specforge_dflash(late, tmp_path / "dump"),
        config_alone,
        tmp_path / "out",
        draft=PAIR / "draft",
        greedy=True,
    )
    assert report.layout.shift == -1
    assert "declared (--greedy), not measured" in " ".join(report.layout.sentences())
    assert len(report.traces) == NUM_PROMPTS


@pytest.mark.parametrize(
    ("name", "builder"), [("specforge", specforge_dflash), ("angelslim", angelslim_dflash)]
)
def test_dumps_for_dflash_have_no_last_states(
    name: Any, builder: Any, recorded: TraceFolder, texts: list[Text], draft: LoadedDraft,
    tmp_path: Path,
) -> None:  # fmt: skip
    dump = builder(texts, tmp_path / "dump")
    report = import_dump(name, dump, TARGET, tmp_path / "out", greedy=True)
    assert report.layout.head is None
    assert largest_difference(recorded, report.traces) <= ROUNDING[torch.float32]
    assert counts(draft, report.traces) == counts(draft, recorded)


def test_last_states_may_be_the_last_aux_slot(
    recorded: TraceFolder, texts: list[Text], tmp_path: Path
) -> None:
    """A draft that reads the last layer: no slot beside the aux ones, and the head reads it too."""
    dump = vllm(texts, tmp_path / "dump", (1, 2))
    report = import_dump("vllm", dump, TARGET, tmp_path / "out", prompts=prompts_of(recorded))
    assert report.layout.layer_ids == (1, 2, 3)
    assert "the last layer is among them" in " ".join(report.layout.sentences())
    assert report.layout.head is not None


@pytest.mark.vendor
@needs("modelopt")
def test_modelopts_own_reader_reads_the_fixture(texts: list[Text], tmp_path: Path) -> None:
    from modelopt.torch.speculative.eagle.utils import OfflineSupervisedDataset

    files = sorted(modelopt(texts[:2], tmp_path / "dump").iterdir())
    read: Sequence[Any] = OfflineSupervisedDataset([str(file) for file in files])
    for text, entry in zip(texts, read, strict=False):
        assert torch.equal(entry["input_ids"], text.token_ids)
        assert torch.equal(entry["aux_hidden_states"], text.aux((0, 1, 2)))
        assert torch.equal(entry["base_model_hidden_states"], text.normed)
