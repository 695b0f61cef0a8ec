"""`check --fix` on what the toolkits themselves export: Quark 0.13's pack order, ModelOpt's model*.

Each test shows first that the fault is there, and fails when the vendor repairs it.
"""

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from draftquant.quantize.engines import check_draft
from draftquant.quantize.engines.repairs import plan_repairs, repair_draft
from draftquant.quantize.files.hub import DraftSource
from draftquant.quantize.verify import verify
from draftquant.scripts.cli import main
from safetensors.torch import save_file
from test_foreign import (
    LINEARS,
    module_tree,
    needs_modelopt,
    needs_quark,
    quark_file_to_file,
    run_linears,
)
from tiny import read_tensors, tiny_eagle3_llama
from torch import nn

pytestmark = [
    pytest.mark.vendor,
    pytest.mark.filterwarnings("ignore"),  # the toolkits' own
]
LEFT_BY_QUARK = {f"{module}.weight_zero_point" for module in LINEARS}
"""What no config can repair: Quark from file to file does not store them; no engine reads them."""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_eagle3_llama(
        tmp_path_factory.mktemp("source") / "draft",
        hidden=128,
        intermediate=256,
        heads=4,
        kv_heads=2,
        head_dim=32,
        vocab=96,
    )


def wrong_codes(folder: Path, source: Path) -> set[str]:
    """Tensors whose codes are not the nearest rounding of the source."""
    faults = verify(folder, source).faults
    return {
        fault.where
        for fault in faults
        if fault.expected == "the quantized values nearest to weight/scale"
    }


@needs_quark
def test_quark_int4_from_file_to_file(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = quark_file_to_file(
        source,
        tmp_path / "quark",
        lambda q: q.Int4PerChannelSpec(
            symmetric=True, scale_type="float", round_method="half_even", ch_axis=0
        ),
    )
    assert wrong_codes(folder, source) == {f"{module}.weight" for module in LINEARS}
    arguments = ["check", str(folder), "--engine", "vllm", "--fix", "--json"]
    main([*arguments, "--out", str(tmp_path / "unproven")])
    assert "the pack order 'reorder' is not proven" in capsys.readouterr().out
    main([*arguments, "--out", str(tmp_path / "out"), "--against", str(source)])
    found = json.loads(capsys.readouterr().out)
    assert [repair["name"] for repair in found["repairs"]][:3] == [
        "excludes",
        "pack-order",
        "index",
    ]
    assert found["notes"] == []
    assert wrong_codes(tmp_path / "out", source) == set()
    report = verify(tmp_path / "out", source)
    assert {fault.where for fault in report.faults} == LEFT_BY_QUARK
    assert report.scheme == "quark int4 per channel (order), activations none"
    # 0.12 of a Gaussian row is lost by INT4 per channel; a wrong order loses all of it, and more.
    assert all(linear.relative_l2_error < 0.13 for linear in report.linears)
    assert read_tensors(tmp_path / "out") == read_tensors(folder)


class Trained(nn.Module):
    """A target with its draft, as ModelOpt holds a draft that it has trained."""

    def __init__(self, draft: nn.Module) -> None:
        super().__init__()
        self.model = nn.Module()
        self.model.layers = nn.ModuleList([nn.Linear(16, 16, bias=False)])
        self.lm_head = nn.Linear(16, 32, bias=False)
        self.eagle_module = draft


@needs_modelopt
def test_modelopt_draft_export(source: Path, tmp_path: Path) -> None:
    """ModelOpt's own list for such a pair; its exporter of drafts writes it in the nested form."""
    import modelopt.torch.quantization as mtq
    from modelopt.torch.export.quant_utils import get_quant_config, postprocess_state_dict
    from modelopt.torch.export.unified_export_hf import _process_quantized_modules

    chosen: dict[str, Any] = copy.deepcopy(mtq.FP8_DEFAULT_CFG)
    kept = ("model.*", "lm_head*", "*embed_tokens*", "*eagle_module.lm_head*", "*fc.*")
    chosen["quant_cfg"] += [{"quantizer_name": name, "enable": False} for name in kept]
    pair = Trained(module_tree(source))
    model = mtq.quantize(pair, chosen, forward_loop=lambda both: run_linears(both.eagle_module))
    with torch.no_grad():
        nested = get_quant_config(model)
        _process_quantized_modules(model, torch.float32)
        stored = postprocess_state_dict(model.state_dict(), 448, None)
    assert "model*" in nested["quantization"]["exclude_modules"]
    folder = tmp_path / "modelopt"
    shutil.copytree(source, folder)
    tensors = {
        name.removeprefix("eagle_module."): tensor.contiguous()
        for name, tensor in stored.items()
        if name.startswith("eagle_module.")
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text(encoding="utf-8")) | {
        "quantization_config": nested
    }
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    before = [check_draft(folder, engine=e, arch="sm90").verdict for e in ("vllm", "sglang")]
    assert "LOADS" not in before
    plan = plan_repairs(folder, engine="vllm", against=source)
    assert plan.notes == ()
    assert [repair.name for repair in plan.repairs][:3] == ["declaration", "excludes", "side-file"]
    repair_draft(plan, tmp_path / "out", source=DraftSource(folder=folder))
    after = [
        check_draft(tmp_path / "out", engine=e, arch="sm90").verdict for e in ("vllm", "sglang")
    ]
    assert after == ["LOADS", "LOADS"]
    assert verify(tmp_path / "out", source).ok
