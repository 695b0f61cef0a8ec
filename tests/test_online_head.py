"""Heads that vLLM quantizes while it loads a draft: `--head-online`.

`engines/online_head.json` has digests of what vLLM 0.33's own functions make of heads; they ran on
a CPU (`engines/online_head.py`).
"""

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import corpus
import pytest
import torch
from draftquant.calibration.passes.memory import estimate_replay
from draftquant.calibration.prompts.prompt_file import Prompt
from draftquant.calibration.traces.trace_folder import TraceFolder
from draftquant.quantize.stored import online_rounding
from draftquant.quantize.stored.loading import load_draft
from draftquant.quantize.stored.online_rounding import quantized_head
from draftquant.quantize.stored.stored_tables import EMBEDDING, HEAD
from draftquant.recipes.errors import CheckpointError
from draftquant.recipes.formats import OnlineHead
from draftquant.scripts.cli import main
from recorded import record_traces
from tied_pair import prompt_tokens, save_draft, save_target
from tiny import tiny_eagle3_llama
from tiny_dflash import tiny_dflash
from tiny_mtp import tiny_step3p5_mtp
from torch import Tensor

ENGINES = Path(__file__).parents[1] / "experiments" / "engines"
sys.path.append(str(ENGINES))  # its modules stand alone

import online_head  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")

RECORDED = json.loads((ENGINES / "online_head.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("how", ["fp8", "nvfp4"])
def test_it_is_what_vllms_own_functions_make(how: OnlineHead) -> None:
    for name, head in online_head.heads().items():
        assert online_head.digest(quantized_head(head, how)) == RECORDED[name][how], name


# ---- which drafts get one


def own_tables(folder: Path) -> dict[str, Tensor]:
    """A target with the tables of the draft."""
    weights = load_draft(folder).weights
    return {name: weights[name].to(torch.bfloat16) for name in (EMBEDDING, HEAD)}


def changed(folder: Path) -> dict[str, Tensor]:
    shared = own_tables(folder)
    shared[HEAD][7, 5] += 1
    return shared


def zeros(_: Path) -> dict[str, Tensor]:
    return dict.fromkeys((HEAD, EMBEDDING), torch.zeros(96, 64))


REFUSED: tuple[tuple[Callable[[Path], Path], Callable[[Path], dict[str, Tensor]], str], ...] = (
    (tiny_eagle3_llama, lambda _: {}, "nothing here shows that head"),
    (tiny_eagle3_llama, changed,
     "row 7 of lm_head differs .* 'draft_lm_head_quantization needs a drafter that shares"),
    (lambda to: tiny_eagle3_llama(to, pruned_vocabulary=True), zeros,
     r"lm_head is \[48, 64\], the target's head \[96, 64\]"),
    (lambda to: shutil.copytree(corpus.quantized("eagle3-llama", "fp8-ptpc-head"), to), zeros,
     "is stored quantized already, in 8 bits"),
    (tiny_dflash, zeros, "not supported for method 'dflash'"),
    (tiny_step3p5_mtp, zeros, "have heads of their own"),
)  # fmt: skip


def test_what_vllm_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(online_rounding, "_ROWS", 4)  # row 7 is of the second block
    for number, (write, tables, said) in enumerate(REFUSED):
        folder = write(tmp_path / str(number))
        with pytest.raises(CheckpointError, match=said) as caught:
            load_draft(folder, shared=tables(folder), online_head="fp8")
        assert str(caught.value).startswith(f"--head-online fp8, {number}: ")
    folder = tiny_eagle3_llama(tmp_path / "draft", hidden=72)
    shared = own_tables(folder)
    assert load_draft(folder, shared=shared, online_head="fp8").quantized
    with pytest.raises(CheckpointError, match="groups of 16 inputs, and the head has 72"):
        load_draft(folder, shared=shared, online_head="nvfp4")


# ---- in replay and gate


def test_what_is_replayed_and_judged_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = save_target(tmp_path / "target")
    draft = str(save_draft(tmp_path / "draft", target))
    asked = [
        Prompt(id=f"p{i}", category="a", token_ids=ids) for i, ids in enumerate(prompt_tokens(3, 7))
    ]
    record_traces(target, asked, tmp_path / "traces", max_new_tokens=60, table_ids=())
    estimate = estimate_replay(
        [Path(draft), Path(draft)],
        TraceFolder.open(tmp_path / "traces"),
        dtype=torch.float32,
        device=torch.device("cpu"),
        num_draft_tokens=1,
        batch_size=None,
        online_heads=[None, "nvfp4"],
    )
    assert estimate.drafts[1].own == 4 * 96 * 64  # in float32; all else is the first one's
    given = ["--traces", str(tmp_path / "traces"), "--head-online", "nvfp4", "-k", "1", "--json"]
    assert main(["replay", draft, draft, *given]) == 0
    plain, served = json.loads(capsys.readouterr().out)
    assert (plain["name"], plain["head_online"]) == ("draft", None)
    assert (served["name"], served["head_online"]) == ("draft, head nvfp4 online", "nvfp4")
    assert main(["gate", draft, draft, *given]) == 3  # three prompts decide nothing
    report = json.loads(capsys.readouterr().out)
    assert report["drafts"]["candidate"]["quantization"] == "none, head nvfp4 online"
    assert any('"draft_lm_head_quantization": "nvfp4"' in one for one in report["warnings"])
    assert main(["gate", draft, draft, *given[:2]]) == 2
