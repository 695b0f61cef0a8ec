"""Which draft a server runs by its own words, and which one `--draft` says."""

import shutil
from dataclasses import replace
from pathlib import Path

import corpus
import pytest
from draftquant.recipes.errors import MeasureError
from draftquant.validate.measure.measurement import ServerIdentity, Speculation
from draftquant.validate.measure.measuring import DraftIdentity, identified
from draftquant.validate.runs.report_pages import draft_identity

SERVER = ServerIdentity(
    engine="vllm",
    version="0.32.0",
    model="the-target",
    arguments={"root": "/models/target", "max_model_len": 4096},
)


@pytest.fixture
def plain() -> Path:
    return corpus.draft("eagle3-llama")


@pytest.fixture
def int4() -> Path:
    return corpus.quantized("eagle3-llama", "int4-channel")


def told(draft: DraftIdentity, named: str | None, quantization: str | None = None) -> Speculation:
    served = Speculation(num_draft_tokens=3, draft=named, draft_quantization=quantization)
    return identified(served, draft, SERVER)


def test_the_same_folder_by_another_path(plain: Path, int4: Path, tmp_path: Path) -> None:
    mounted, copied = tmp_path / "mnt", tmp_path / "other name"
    mounted.symlink_to(int4)
    shutil.copytree(int4, copied)
    for named, how in ((int4, "path"), (mounted, "path"), (copied, "tensors")):
        found = told(draft_identity(str(int4)), str(named), "compressed-tensors")
        assert (found.told_by, found.draft, found.served_draft) == (how, int4.name, str(named))
        assert found.draft_quantization == "int4-channel"
        assert found.served_quantization == "compressed-tensors"
    with pytest.raises(
        MeasureError, match=f"the draft that the server runs, '.*', got '{int4.name}'"
    ):
        told(draft_identity(str(int4)), str(plain))


def test_another_machine_has_the_draft_by_its_name_or_by_what_the_user_says(int4: Path) -> None:
    name = int4.name
    draft = draft_identity(str(int4))
    for named in (f"/elsewhere/{name}", f"a/{name}", f"/c/models--me--{name}/snapshots/1f"):
        assert told(draft, named).told_by == "name"
    for named in ("/elsewhere/bf16", f"someone/{name}-gptq", f"{name}/bf16", "/" + "x" * 5000):
        with pytest.raises(MeasureError, match="--served-as") as caught:
            told(draft, named)
        assert caught.value.where == "--draft"
    of_the_hub = replace(draft, draft="someone/a-draft", folder=Path("/c/models--b--x/snapshots/1"))
    assert told(of_the_hub, "/d/models--someone--a-draft/snapshots/2").told_by == "name"
    draft = draft_identity(str(int4), served_as="/draft")
    found = told(draft, "/draft")
    assert (found.told_by, found.served_draft, found.draft) == ("user", "/draft", name)
    for other, shown in (("/draft2", "'/draft2', got"), (None, "None")):
        with pytest.raises(MeasureError, match=f"what the server calls its draft, {shown}"):
            told(draft, other)


def test_a_server_that_names_no_draft_contradicts_nothing_but_its_quantization(
    plain: Path, int4: Path
) -> None:
    """One that names its target has the draft in it, as MTP layers are."""
    bf16, quantized = (draft_identity(str(folder)) for folder in (plain, int4))
    for named in (None, "/models/target", ""):
        assert told(quantized, named).told_by is None
    assert told(quantized, "/models/target", "none").served_draft == "/models/target"
    for draft, quantization in ((bf16, "fp8"), (quantized, "unquant"), (quantized, "none")):
        with pytest.raises(MeasureError, match="the server reports quantization"):
            told(draft, None, quantization)
    for draft, quantization in (
        (bf16, "unquant"),
        (bf16, "none"),
        (quantized, "gptq_marlin"),
    ):
        assert told(draft, None, quantization).served_quantization == quantization
