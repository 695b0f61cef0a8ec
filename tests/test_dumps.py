"""Dumps of every trainer become the traces that our own recorder writes."""

import dataclasses
import shutil
from pathlib import Path

import corpus
import dumps
import pytest
import torch
from draftquant.calibration.dumps.dump_answers import Answers
from draftquant.calibration.dumps.dump_layouts import Sample, load_states, samples_of
from draftquant.calibration.prompts.prompt_file import Prompt
from draftquant.calibration.traces.target_tables import TargetTables
from draftquant.calibration.traces.trace_folder import TraceFolder
from draftquant.quantize.stored.stored_tables import EMBEDDING, HEAD
from draftquant.recipes.errors import TraceError
from draftquant.scripts.cli import main
from dumps import BUILDERS, LAYERS, Text, import_dump, make_texts, modelopt, prompts_of, roll
from safetensors.torch import load_file, save_file
from torch import Tensor

pytestmark = pytest.mark.usefixtures("one_thread")

PAIR = corpus.PAIRS / "eagle3-llama"
TARGET = PAIR / "target"
FP8 = torch.float8_e4m3fn
SCALES = "hidden_states_scales"


@pytest.fixture(scope="module")
def recorded() -> TraceFolder:
    return TraceFolder.open(corpus.traces("eagle3-llama", prompts=10, max_new_tokens=40))


@pytest.fixture(scope="module")
def texts(recorded: TraceFolder) -> list[Text]:
    return make_texts(TARGET, recorded, torch.float32)


def largest_difference(ours: TraceFolder, theirs: TraceFolder) -> float:
    return max(
        float((a.features[: len(b.features)].float() - b.features.float()).abs().max())
        for a, b in zip(ours, theirs, strict=False)
    )


@pytest.mark.parametrize("layout", BUILDERS)
def test_a_layout_is_read_as_it_is_written(layout: str, texts: list[Text], tmp_path: Path) -> None:
    """In the order of the numbers in the names of the files."""
    name, build = BUILDERS[layout]
    many = [dataclasses.replace(texts[i % 4], start=texts[0].start + i) for i in range(11)]
    samples = [pending.read() for pending in samples_of(build(many, tmp_path / "dump"), name)]
    assert len(samples) == 11
    for text, sample in zip(many, samples, strict=True):
        count = len(text.token_ids) - (layout == "vllm")  # the last token was never read
        assert torch.equal(sample.token_ids[:count], text.token_ids[:count])
        aux = text.stack(LAYERS).flatten(1) if layout == "vllm" else text.aux(LAYERS)
        assert torch.equal(sample.aux[:count], aux[:count])
        if sample.answered is not None and layout != "modelopt by vllm":
            assert torch.equal(sample.answered[:count].long(), text.mask)
            assert not bool(sample.answered[count:].any())
        before = layout in ("torchspec", "modelopt by vllm", "speculators")
        if sample.last is not None:
            assert torch.equal(sample.last[:count], text.layers[-1] if before else text.normed)
    assert (samples[0].last is None) == ("dflash" in layout or layout == "vllm")
    assert (samples[0].answered is None) == (layout == "vllm")


@pytest.mark.some(1)
@pytest.mark.parametrize("layout", ["specforge", "speculators", "modelopt by vllm"])
def test_an_imported_dump_is_what_our_recorder_writes(
    layout: str, recorded: TraceFolder, texts: list[Text], tmp_path: Path
) -> None:
    name, build = BUILDERS[layout]
    few = texts[:4]
    prompts = prompts_of(few) if layout == "modelopt by vllm" else None
    report = import_dump(
        name, build(few, tmp_path / "dump"), TARGET, tmp_path / "out", prompts=prompts,
        draft=PAIR / "draft", tables=True, table_ids=(0,),
    )  # fmt: skip
    traces, layout_found = report.traces, report.layout
    assert (report.num_samples, report.num_off_policy, report.num_without_answer) == (4, 0, 0)
    assert traces.manifest.target == recorded.manifest.target
    assert traces.manifest.features.aux_layer_ids == LAYERS
    assert (traces.manifest.temperature, traces.manifest.recorded_by) == (0, f"dump of {name}")
    for ours, theirs in zip(recorded, traces, strict=False):
        assert torch.equal(theirs.token_ids, ours.token_ids)
        assert theirs.prompt_length == ours.prompt_length
    if prompts is not None:
        found = [(trace.id, trace.category) for trace in traces]
        assert found == [(one.id, one.category) for one in prompts]
    assert largest_difference(recorded, traces) <= 0.5  # recorded in BF16
    assert layout_found.recomputed is not None
    assert layout_found.recomputed.difference < 0.01
    assert layout_found.head is not None
    assert layout_found.head.share > 0.99
    side = "after" if layout == "specforge" else "before"
    assert layout_found.head.norm == f"{side} the last norm"
    assert torch.equal(traces.tables()[HEAD], TargetTables.find(TARGET).shared()[HEAD])
    assert not bool(traces.tables()[EMBEDDING][0].isnan().any())


def test_a_sample_belongs_to_the_longest_prompt_that_it_begins_with() -> None:
    short = Prompt(id="short", category="short", token_ids=(5, 6))
    long = Prompt(id="long", category="long", token_ids=(5, 6, 7, 8))
    tokens, none = torch.tensor([5, 6, 7, 8, 9, 3]), dict.fromkeys(("answered", "last", "scales"))
    sample = Sample(id="0", file=Path("0"), token_ids=tokens, aux=torch.zeros(6, 1), **none)
    for prompts in ([short, long], [long, short]):
        (answer,) = Answers([3], prompts).of(sample)
        assert (answer.id, answer.category, answer.start) == ("long", "long", 4)


def test_what_is_an_answer(texts: list[Text], tmp_path: Path) -> None:
    """Each run of a mask up to an end of text; of one text none, and behind answers anything."""
    start, count = texts[0].start, len(texts[0].token_ids)
    ended = texts[1].token_ids.clone()
    ended[start + 20] = 0  # <|endoftext|>, which the target did not say here
    dump = modelopt([texts[0], dataclasses.replace(texts[1], token_ids=ended), *texts[2:5]],
                    tmp_path / "dump")  # fmt: skip
    for number, edit in enumerate((
        lambda saved: saved["loss_mask"][start + 10 : start + 15].zero_(),
        lambda saved: saved["aux_hidden_states"][start + 21 :].fill_(torch.nan),
        lambda saved: saved["loss_mask"].zero_(),
    )):  # fmt: skip
        file = dump / f"conversation-{number}.pt"
        saved = torch.load(file)
        edit(saved)
        torch.save(saved, file)
    with pytest.raises(TraceError, match="did not write 1 of 5 answers"):
        import_dump("modelopt", dump, TARGET, tmp_path / "out")
    report = import_dump("modelopt", dump, TARGET, tmp_path / "out", leave_out_off_policy=True)
    assert (report.num_without_answer, report.num_off_policy) == (1, 1)
    first, second, third, *_ = report.traces
    assert [(one.id, one.prompt_length, one.num_tokens) for one in (first, second)] == [
        ("conversation-0/turn-1", start, start + 10),
        ("conversation-0/turn-2", start + 15, count),
    ]
    assert first.conversation_sha256 is None
    assert second.conversation_sha256 == first.prompt_sha256 == second.cluster_sha256
    assert torch.equal(second.features[: len(first.features)], first.features)
    assert (third.id, third.num_tokens) == ("conversation-3", count)
    saved = torch.load(dump / "conversation-0.pt")
    saved["aux_hidden_states"][start + 20].fill_(torch.nan)  # of its second answer
    torch.save(saved, dump / "conversation-0.pt")
    with pytest.raises(TraceError, match=f"position {start + 20}: slot 0 of the aux"):
        import_dump("modelopt", dump, TARGET, tmp_path / "nan", leave_out_off_policy=True)


# ---- what settles the conventions


def test_a_config_alone_will_do(recorded: TraceFolder, texts: list[Text], tmp_path: Path) -> None:
    """Also where rows are behind their tokens, and there are no last states."""
    (tmp_path / "config").mkdir()
    shutil.copy(TARGET / "config.json", tmp_path / "config")
    dump = dumps.specforge_dflash([roll(text, 1) for text in texts], tmp_path / "dump")
    asked = dump, tmp_path / "config", tmp_path / "out"
    report = import_dump("specforge", *asked, draft=PAIR / "draft", greedy=True)
    steps, said = report.layout.draft, " ".join(report.layout.sentences())
    assert report.layout.shift == -1
    assert report.layout.recomputed is None
    assert steps is not None
    assert steps.accepted > max(0.7, steps.next_best + 0.02)
    assert "declared (--greedy), not measured" in said
    assert "the rows were shifted by 1 against their tokens, and were moved back" in said
    assert report.traces.manifest.target.weights_sha256 is None
    assert largest_difference(recorded, report.traces) <= 0.5


def test_last_states_may_be_the_last_aux_slot(texts: list[Text], tmp_path: Path) -> None:
    """A draft that reads the last layer: no slot beside the aux ones, and the head reads it too."""
    dump = dumps.vllm(texts[:3], tmp_path / "dump", (1, 2))
    report = import_dump("vllm", dump, TARGET, tmp_path / "out", prompts=prompts_of(texts))
    assert report.layout.layer_ids == (1, 2, 3)
    assert "the last layer is among them" in " ".join(report.layout.sentences())
    assert report.layout.head is not None


# ---- speculators' FP8 backend


def rounded(states: Tensor) -> dict[str, Tensor]:
    """As hs-connectors 0.9.0 rounds them (fp8_utils.py): one scale for all slots of a token."""
    scales = (states.float().abs().amax(dim=(1, 2), keepdim=True) / 448).clamp(min=1e-12)
    return {"hidden_states": (states.float() / scales).to(FP8), SCALES: scales}


STATES = torch.randn((5, 4, 8), generator=torch.Generator().manual_seed(0)).bfloat16()
SOUND = rounded(STATES) | {"token_ids": torch.arange(5)}


def test_what_is_no_rounded_dump_is_refused(tmp_path: Path) -> None:
    ones = torch.ones(5, 1, 1)
    without = {name: tensor for name, tensor in SOUND.items() if name != SCALES}
    scales = [{SCALES: each} for each in (ones[:4], ones.double(), ones * torch.nan, ones * 0)]
    for tensors in (
        {**SOUND, "hidden_states": STATES},
        without,
        *(SOUND | each for each in scales),
    ):
        save_file(tensors, tmp_path / "hs_0.safetensors")
        with pytest.raises(TraceError):
            load_states(tmp_path / "hs_0.safetensors")


def test_a_rounded_dump_becomes_rounded_traces(texts: list[Text], tmp_path: Path) -> None:
    """The dump's own values and scales, bit for bit, moved back to their tokens."""
    late = [dataclasses.replace(roll(text, 1), stop=80) for text in texts[:4]]
    dump = dumps.speculators(late, tmp_path / "dump")
    files = sorted(dump.rglob("*.safetensors"))
    for file in files:
        tensors = load_file(file)
        save_file(tensors | rounded(tensors["hidden_states"]), file)
    report = import_dump("speculators", dump, TARGET, tmp_path / "out")
    assert (report.layout.shift, report.traces.manifest.features.storage) == (-1, "fp8-per-token")
    stored = load_file(report.traces.folder / "traces-00001.safetensors")
    first, entry = load_file(files[0]), report.traces.manifest.prompts[0]
    rows = slice(1, entry.num_tokens)
    codes = first["hidden_states"][rows, :-1].flatten(1).contiguous()
    assert torch.equal(stored[f"{entry.id}.features"].view(torch.uint8), codes.view(torch.uint8))
    assert torch.equal(stored[f"{entry.id}.feature_scales"], first[SCALES].flatten()[rows])


# ---- the command


def test_import_says_what_it_found(texts: list[Text], tmp_path: Path) -> None:
    dump, out = modelopt(texts[:8], tmp_path / "dump"), tmp_path / "out"
    arguments = ["traces", "import", str(dump), "--from", "modelopt", "--target", str(TARGET)]
    assert main([*arguments, "--out", str(out), "--draft", str(PAIR / "draft"), "--tables"]) == 0
    assert TraceFolder.open(out).manifest.tables is not None
    assert main([*arguments, "--out", str(tmp_path / "j"), "--json"]) == 0


@pytest.mark.parametrize(("off", "warned"), [(0.017, False), (0.079, True)])
def test_states_of_other_weights_are_noticed(
    off: float, warned: bool, texts: list[Text], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two engines' arithmetic, and an INT4 target's, by the differences that were measured."""
    torch.manual_seed(0)

    def noisy(state: Tensor) -> Tensor:
        noise = torch.randn_like(state)
        return state + off * noise * state.norm(dim=1, keepdim=True) / noise.norm(dim=1)[:, None]

    few = [dataclasses.replace(text, layers=tuple(map(noisy, text.layers))) for text in texts[:2]]
    dump = str(modelopt(few, tmp_path / "dump"))
    arguments = ["traces", "import", dump, "--from", "modelopt", "--target", str(TARGET)]
    assert main([*arguments, "--out", str(tmp_path / "out")]) == 0
    warning = " ".join(capsys.readouterr().err.split())
    assert ("what the target computes by" in warning) == warned
    if warned:
        assert "by 7.9% in the median" in warning
        assert "by less than 4%: probably the target was dumped with other weights" in warning


def test_split_and_merge(recorded: TraceFolder, tmp_path: Path) -> None:
    sides = [str(tmp_path / "calibration"), str(tmp_path / "gate")]
    arguments = ["traces", "split", str(recorded.folder), "--out", *sides]
    assert main([*arguments, "--fraction", "0.18"]) == 0  # of 10: 1.8
    assert [len(TraceFolder.open(Path(side))) for side in sides] == [2, 8]
    assert main(["traces", "merge", *sides, "--out", str(tmp_path / "m")]) == 0
    assert main([*arguments, "--count", "3"]) == 2
    assert main(["traces", "merge", sides[0], sides[0], "--out", str(tmp_path / "n")]) == 2
    arguments[-2:] = [str(tmp_path / "x"), str(tmp_path / "y")]
    assert main([*arguments, "--fraction", "1.5"]) == 2
    with pytest.raises(SystemExit):
        main(arguments)
