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


@pytest.fixture(scope="module")
def drafts(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """BF16, and quantized."""
    folder = tmp_path_factory.mktemp("drafts")
    plain, int4 = folder / "bf16", folder / "int4"
    shutil.copytree(corpus.draft("eagle3-llama"), plain)
    shutil.copytree(corpus.quantized("eagle3-llama", "int4-channel"), int4)
    return plain, int4


def told(draft: DraftIdentity, named: str | None, quantization: str | None = None) -> Speculation:
    served = Speculation(num_draft_tokens=3, draft=named, draft_quantization=quantization)
    return identified(served, draft, SERVER)


def test_the_same_folder_by_another_path(drafts: tuple[Path, Path], tmp_path: Path) -> None:
    plain, int4 = drafts
    mounted, copied = tmp_path / "mnt", tmp_path / "other name"
    mounted.symlink_to(int4)
    shutil.copytree(int4, copied)
    for named, how in ((int4, "path"), (mounted, "path"), (copied, "tensors")):
        found = told(draft_identity(str(int4)), str(named), "compressed-tensors")
        assert found.told_by == how
        assert (found.draft, found.served_draft) == ("int4", str(named))
        assert found.draft_quantization == "int4-channel"
        assert found.served_quantization == "compressed-tensors"
    with pytest.raises(
        MeasureError, match=r"the draft that the server runs, '.*/bf16', got 'int4'"
    ):
        told(draft_identity(str(int4)), str(plain))


def test_a_path_of_another_machine_is_known_by_its_name(drafts: tuple[Path, Path]) -> None:
    draft = draft_identity(str(drafts[1]))
    for named in ("/elsewhere/int4", "int4", "someone/int4", "/c/models--me--int4/snapshots/1f"):
        assert told(draft, named).told_by == "name"
    for named in ("/elsewhere/bf16", "someone/int4-gptq", "int4/bf16", "/" + "x" * 5000):
        with pytest.raises(MeasureError, match="--served-as") as caught:
            told(draft, named)
        assert caught.value.where == "--draft"
    of_the_hub = replace(draft, draft="someone/a-draft", folder=Path("/c/models--b--x/snapshots/1"))
    assert told(of_the_hub, "/d/models--someone--a-draft/snapshots/2").told_by == "name"


def test_another_name_of_the_same_is_for_the_user_to_say(drafts: tuple[Path, Path]) -> None:
    draft = draft_identity(str(drafts[1]), served_as="/draft")
    found = told(draft, "/draft")
    assert (found.told_by, found.served_draft, found.draft) == ("user", "/draft", "int4")
    with pytest.raises(MeasureError, match="what the server calls its draft, '/draft2', got"):
        told(draft, "/draft2")
    with pytest.raises(MeasureError, match="what the server calls its draft, None"):
        told(draft, None)


def test_a_server_that_names_no_draft_contradicts_nothing(drafts: tuple[Path, Path]) -> None:
    """One that names its target has the draft in it, as MTP layers are."""
    draft = draft_identity(str(drafts[1]))
    assert told(draft, None).told_by is None
    assert told(draft, "/models/target").told_by is None
    assert told(draft, "/models/target", "none").served_draft == "/models/target"
    assert told(draft, "").told_by is None


def test_a_quantization_that_the_folder_does_not_have(drafts: tuple[Path, Path]) -> None:
    plain, int4 = (draft_identity(str(folder)) for folder in drafts)
    for draft, quantization in ((plain, "fp8"), (int4, "unquant"), (int4, "none")):
        with pytest.raises(MeasureError, match="the server reports quantization"):
            told(draft, None, quantization)
    for draft, quantization in ((plain, "unquant"), (plain, "none"), (int4, "gptq_marlin")):
        assert told(draft, None, quantization).served_quantization == quantization
