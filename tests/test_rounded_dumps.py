"""Dumps of speculators' FP8 backend: scales are kept, and what is no such dump is refused."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from draftquant.calibration.dumps.dump_answers import Answer, Answers
from draftquant.calibration.dumps.dump_layouts import Sample, load_states
from draftquant.calibration.dumps.import_dump import _Conversion
from draftquant.quantize.stored.loading import load_draft
from draftquant.recipes.errors import TraceError
from draftquant.validate.counting.trace_replay import replay_drafts
from dumps import import_dump, make_texts, prompts_of, speculators, vllm
from safetensors.torch import load_file, save_file
from test_dumps import PAIR, TARGET, record
from torch import Tensor

FP8 = torch.float8_e4m3fn
SCALES = "hidden_states_scales"


def rounded(states: Tensor) -> dict[str, Tensor]:
    """As hs-connectors 0.9.0 rounds them (fp8_utils.py): one scale for all slots of a token."""
    scales = (states.float().abs().amax(dim=(1, 2), keepdim=True) / 448).clamp(min=1e-12)
    return {"hidden_states": (states.float() / scales).to(FP8), SCALES: scales}


STATES = torch.randn((5, 4, 8), generator=torch.Generator().manual_seed(0)).bfloat16()
SOUND = rounded(STATES) | {"token_ids": torch.arange(5)}


def test_states_are_values_times_scales(tmp_path: Path) -> None:
    save_file(SOUND, tmp_path / "hs_0.safetensors")
    ids, _, states, _, scales = load_states(tmp_path / "hs_0.safetensors")
    assert ids.tolist() == [0, 1, 2, 3, 4]
    assert scales is not None
    assert torch.equal(scales, STATES.float().abs().amax(dim=(1, 2)) / 448)
    assert states.dtype == torch.bfloat16
    off = (states.float() - STATES.float()).abs()
    bound = (STATES.float().abs() * 2**-4).maximum(scales[:, None, None] * 2**-10)
    assert bool((off <= bound * (1 + 2**-7)).all())


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"hidden_states": STATES}, "are bfloat16, with hidden_states_scales"),
        ({SCALES: None}, "are float8_e4m3fn, without hidden_states_scales"),
        ({SCALES: torch.ones(5)}, r"expected F32 \[5, 1, 1\], got \[5\]"),
        ({SCALES: torch.ones(4, 1, 1)}, r"got \[4, 1, 1\]"),
        ({SCALES: torch.ones(5, 1, 1).double()}, "expected F32"),
        ({SCALES: torch.full((5, 1, 1), torch.nan)}, "expected positive numbers"),
        ({SCALES: torch.zeros(5, 1, 1)}, "expected positive numbers"),
    ],
)
def test_what_is_no_rounded_dump_is_refused(
    tmp_path: Path, changed: dict[str, Tensor | None], said: str
) -> None:
    tensors = {name: one for name, one in (SOUND | changed).items() if one is not None}
    save_file(tensors, tmp_path / "hs_0.safetensors")
    with pytest.raises(TraceError, match=said):
        load_states(tmp_path / "hs_0.safetensors")


@pytest.mark.parametrize("shift", [0, -1])
def test_scales_stay_beside_their_states(shift: int) -> None:
    """A sample whose rows belong to the token before them is moved back, scales too."""
    layout: Any = SimpleNamespace(last_in_aux=False, head=None, shift=shift)
    facts: Any = SimpleNamespace(tables=None)
    rows = torch.arange(7.0)
    sample = Sample(id="a", file=Path("a"), token_ids=torch.arange(7), answered=None,
                    aux=rows[:, None].repeat(1, 4), last=rows[:, None], scales=rows)  # fmt: skip
    answer = Answer(id="a", category="", sample=sample, start=2, stop=5, first_start=2)
    trace = _Conversion(layout, facts, sample, Answers((), None)).trace(answer)
    assert trace.feature_scales is not None
    assert trace.feature_scales.tolist() == trace.features[:, 0].tolist()
    assert trace.feature_scales.tolist() == [-shift + i for i in range(4)]


@pytest.mark.slow
@pytest.mark.parametrize("tool", ["speculators", "vllm"])
def test_a_rounded_dump_becomes_rounded_traces(tool: str, tmp_path: Path) -> None:
    """The dump's own values and scales, bit for bit; counts as near BF16's as rounding leaves."""
    ours = record(tmp_path / "ours", "bfloat16")
    texts, prompts = make_texts(TARGET, ours, torch.bfloat16), prompts_of(ours)
    builder = speculators if tool == "speculators" else vllm
    dump, draft = builder(texts, tmp_path / "dump"), load_draft(PAIR / "draft")
    how = {"draft": PAIR / "draft", "prompts": prompts if tool == "vllm" else None}
    exact = import_dump(tool, dump, TARGET, tmp_path / "exact", **how).traces  # type: ignore[arg-type]
    files = sorted(dump.rglob("*.safetensors"))
    for file in files:
        tensors = load_file(file)
        save_file(tensors | rounded(tensors["hidden_states"]), file)
    traces = import_dump(tool, dump, TARGET, tmp_path / "out", **how).traces  # type: ignore[arg-type]
    assert traces.manifest.features.storage == "fp8-per-token"
    stored = load_file(traces.folder / "traces-00001.safetensors")
    first, entry = load_file(files[0]), traces.manifest.prompts[0]
    rows = entry.num_tokens - 1
    codes = first["hidden_states"][:rows, :-1].flatten(1)
    kept = stored[f"{entry.id}.features"]
    assert torch.equal(kept.view(torch.uint8), codes.contiguous().view(torch.uint8))
    assert torch.equal(stored[f"{entry.id}.feature_scales"], first[SCALES].flatten()[:rows])
    replays = [replay_drafts([draft], one, num_draft_tokens=3)[0] for one in (exact, traces)]
    lengths = [one.counts.mean_acceptance_length for one in replays]
    assert abs(lengths[1] / lengths[0] - 1) < 0.02
    save_file(load_file(files[1]) | {"hidden_states": STATES[:1]}, files[1])
    with pytest.raises(TraceError):
        import_dump(tool, dump, TARGET, tmp_path / "mixed", **how)  # type: ignore[arg-type]
