"""`verify --sign`, `--verify-signature`: by model-signing itself, with keys that are made here."""

import base64
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)
from draftquant.quantize.errors import CheckpointError, OutputError
from draftquant.quantize.files.checkpoint import Checkpoint
from draftquant.quantize.files.model_signature import (
    differences,
    read_signature,
    sign_folder,
    verify_signature,
)
from draftquant.quantize.files.unpickle_draft import unpickle_draft
from draftquant.scripts.api.push import push
from draftquant.scripts.cli import main
from tiny import tiny_eagle3_llama


def write_keys(folder: Path, name: str, key: Any = None, password: bytes | None = None) -> Path:
    """NAME.pem and NAME.pub; the former's path."""
    key = key or ec.generate_private_key(ec.SECP256R1())
    lock = BestAvailableEncryption(password) if password else NoEncryption()
    secret = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, lock)
    (folder / f"{name}.pem").write_bytes(secret)
    shown = key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    (folder / f"{name}.pub").write_bytes(shown)
    return folder / f"{name}.pem"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A draft, its INT4 folder "out" with a card for the Hub, signed by "mine", and keys."""
    folder = tmp_path_factory.mktemp("signed")
    draft, out = tiny_eagle3_llama(folder / "draft"), folder / "out"
    assert main(["quantize", str(draft), "--recipe", "int4-channel", "--out", str(out)]) == 0
    card = ["--base-model", "a/b", "--license", "mit", "--out", str(out / "README.md")]
    assert main(["card", str(out), *card, "--overwrite"]) == 0
    shutil.copytree(out, folder / "unsigned")
    write_keys(folder, "mine")
    write_keys(folder, "other")
    against = ["--against", str(draft)]
    assert main(["verify", str(out), *against, "--sign", str(folder / "mine.pem")]) == 0
    return folder


@pytest.fixture
def out(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made / "out", tmp_path / "out"))


def faults(out: Path, made: Path) -> tuple[str, ...]:
    report = verify_signature(out, made / "mine.pub")
    code = main(["verify", str(out), "--verify-signature", str(made / "mine.pub")])
    assert code == (0 if report.ok else 1)
    return report.faults


def test_a_signed_folder_is_who_signed_it(
    made: Path, out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert faults(out, made) == ()
    assert "all 6 files are as the holder of the key signed them" in " ".join(
        capsys.readouterr().out.split()
    )
    key = ["--verify-signature", str(made / "mine.pub")]
    assert main(["verify", str(out), *key, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["ok"] is True
    assert set(said["signature"]["files"]) == {path.name for path in out.iterdir()} - {"model.sig"}
    against = ["--against", str(made / "draft")]
    assert main(["verify", str(out), *against, *key, "--json"]) == 0  # the signature is no stray
    said = json.loads(capsys.readouterr().out)
    assert (said["quantized"], said["signature"]["faults"], said["signed"]) == (7, [], None)


def model_signing(*arguments: object) -> int:
    """The library's own command."""
    command = [sys.executable, "-P", "-m", "model_signing", *map(str, arguments)]
    return subprocess.run(command, check=False, capture_output=True).returncode


def test_the_own_command_of_model_signing_says_the_same(made: Path, out: Path) -> None:
    signature = ("--signature", out / "model.sig")
    verify = ("verify", "key", "--public_key", made / "mine.pub", *signature, out)
    assert model_signing(*verify) == 0
    (out / ".cache/huggingface").mkdir(parents=True)  # as `hf download --local-dir` leaves it
    (out / ".cache/huggingface/noted").write_text("x", encoding="utf-8")
    (out / ".gitattributes").write_text("x", encoding="utf-8")
    assert (model_signing(*verify), faults(out, made)) == (0, ())
    (out / "tokenizer.json").write_text("{}", encoding="utf-8")
    assert model_signing(*verify) == 1
    (out / "model.sig").unlink()
    shutil.rmtree(out / ".cache")
    sign = ("sign", "key", "--private_key", made / "mine.pem", *signature, out)
    assert model_signing(*sign) == 0
    assert faults(out, made) == ()


def edit(file: str) -> Callable[[Path], object]:
    return lambda out: (out / file).write_text("{}", encoding="utf-8")


CHANGES: Mapping[str, tuple[Callable[[Path], object], str]] = {
    "a changed file": (edit("tokenizer_config.json2"), "tokenizer_config.json2: is not signed"),
    "another config": (edit("config.json"), "config.json: expected sha256 "),
    "another record": (edit("draftquant.json"), "draftquant.json: expected sha256 "),
    "an added file": (edit("modeling_x.py"), "modeling_x.py: is not signed"),
    "a removed file": (
        lambda out: (out / "README.md").unlink(),
        "README.md: it was signed, but is missing",
    ),
    "a file of git": (edit(".gitignore"), ".gitignore: is not signed"),
    "no signature": (lambda out: (out / "model.sig").unlink(), "expected a signature, got none"),
    "no JSON": (edit("model.sig"), "verificationMaterial: expected an object"),
    "a link elsewhere": (
        lambda out: ((out / "README.md").unlink(), (out / "README.md").symlink_to("/etc/hosts")),
        "README.md: expected a file of the folder, got a link to /etc/hosts",
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_is_not_as_it_was_signed(name: str, made: Path, out: Path) -> None:
    change, what = CHANGES[name]
    change(out)
    assert any(what in fault for fault in faults(out, made))


def forged(out: Path, **changes: object) -> None:
    """model.sig with other resources in it, and the signature that it had."""
    bundle = json.loads((out / "model.sig").read_text(encoding="utf-8"))
    envelope = bundle["dsseEnvelope"]
    statement = json.loads(base64.b64decode(envelope["payload"]))
    for resource in statement["predicate"]["resources"]:
        resource.update(changes)
    envelope["payload"] = base64.b64encode(json.dumps(statement).encode()).decode()
    (out / "model.sig").write_text(json.dumps(bundle), encoding="utf-8")


def test_a_forged_or_foreign_signature(made: Path, out: Path) -> None:
    report = verify_signature(out, made / "other.pub")
    assert not report.ok
    assert "expected the signature of key" in report.faults[0]
    forged(out)  # the same said in other bytes
    assert "model.sig: its content is not what the key signed: it was changed" in faults(out, made)
    forged(out, algorithm="blake3")
    assert any("expected sha256 of each file, got blake3" in fault for fault in faults(out, made))


SIGSTORE = {"verificationMaterial": {"certificate": {}}, "dsseEnvelope": {}}
NO_SIGNATURES: Mapping[str, str] = {
    "[" * 5000: "is no signature by a key",
    "[]": "expected a JSON object",
    json.dumps(SIGSTORE): "is signed by a certificate or an identity",
    json.dumps(
        {"verificationMaterial": {"publicKey": {"hint": ""}}, "dsseEnvelope": {}}
    ): "holds no",
}


@pytest.mark.parametrize("text", NO_SIGNATURES)
def test_what_is_no_signature(text: str, made: Path, out: Path) -> None:
    (out / "model.sig").write_text(text, encoding="utf-8")
    assert any(NO_SIGNATURES[text] in fault for fault in faults(out, made))


@pytest.mark.parametrize("key", ["signatures", "payload", "payloadType"])
@pytest.mark.parametrize("value", [None, [], {}, "x", [{}], [{"sig": "!"}]])
def test_a_broken_envelope_is_a_fault_and_no_traceback(
    key: str, value: object, made: Path, out: Path
) -> None:
    bundle = json.loads((out / "model.sig").read_text(encoding="utf-8"))
    bundle["dsseEnvelope"][key] = value
    (out / "model.sig").write_text(json.dumps(bundle), encoding="utf-8")
    assert faults(out, made)


def test_a_snapshot_of_the_hub_is_verified_through_its_links(made: Path, tmp_path: Path) -> None:
    repository = tmp_path / "models--a--b"
    (repository / "snapshots/abc").mkdir(parents=True)
    (repository / "blobs").mkdir()
    for path in (made / "out").iterdir():
        shutil.copyfile(path, repository / "blobs" / path.name)
        link = repository / "snapshots/abc" / path.name
        link.symlink_to(os.path.relpath(repository / "blobs" / path.name, link.parent))
    assert faults(repository / "snapshots/abc", made) == ()


# ---- signing


def test_only_what_verifies_is_signed(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = Path(shutil.copytree(made / "unsigned", tmp_path / "out"))
    against, sign = ["--against", str(made / "draft")], ["--sign", str(made / "mine.pem")]
    for asked, said in ((sign, "only what verifies is signed"), ([], "missing: --against")):
        assert main(["verify", str(out), *asked]) == 2
        assert said in capsys.readouterr().err
    (out / "notes.txt").write_text("x", encoding="utf-8")
    assert main(["verify", str(out), *against, *sign]) == 1
    assert not (out / "model.sig").exists()
    (out / "notes.txt").unlink()
    assert main(["verify", str(out), *against, *sign, "--json"]) == 0
    capsys.readouterr()
    assert set(read_signature(out).sha256) == {p.name for p in out.iterdir()} - {"model.sig"}
    before = (out / "model.sig").read_bytes()
    with pytest.raises(OutputError, match="a signature exists already"):
        sign_folder(out, made / "mine.pem")
    assert (out / "model.sig").read_bytes() == before
    assert {p.name for p in out.iterdir()} == {p.name for p in (made / "out").iterdir()}


def written(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


BAD_KEYS: Mapping[str, Callable[[Path], Path]] = {
    "it has a password": lambda at: write_keys(at, "k", password=b"x"),
    "another kind of key": lambda at: write_keys(at, "k", rsa.generate_private_key(65537, 2048)),
    "in PEM: another kind": lambda at: write_keys(at, "k", ec.generate_private_key(ec.SECP256K1())),
    "expected a private key": lambda at: write_keys(at, "k").with_suffix(".pub"),
    "No such file": lambda at: at / "none",
    "more than 65,536 bytes": lambda at: written(at / "big", "x" * 65_537),
}


@pytest.mark.parametrize("what", BAD_KEYS)
def test_a_bad_key_signs_nothing(
    what: str, made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = Path(shutil.copytree(made / "unsigned", tmp_path / "out"))
    key = BAD_KEYS[what](tmp_path)
    command = ["verify", str(out), "--against", str(made / "draft"), "--sign", str(key)]
    assert main(command) == 2
    assert what in capsys.readouterr().err
    assert not (out / "model.sig").exists()


def test_a_bad_public_key_is_bad_input(
    made: Path, out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", str(out), "--verify-signature", str(made / "mine.pem")]) == 2
    assert "expected a public key of the curves P-256" in capsys.readouterr().err


def test_without_the_library_it_says_what_to_install(
    made: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "model_signing", None)
    with pytest.raises(CheckpointError) as caught:
        verify_signature(out, made / "mine.pub")
    assert caught.value.fix == "pip install model-signing pyOpenSSL"


# ---- what else sees the file


def test_a_signature_does_not_travel(made: Path, tmp_path: Path) -> None:
    source = Path(shutil.copytree(made / "draft", tmp_path / "source"))
    shutil.copy(made / "out/model.sig", source)
    assert "model.sig" not in Checkpoint.open(source).side_files()
    out = tmp_path / "out"
    assert main(["quantize", str(source), "--recipe", "int4-channel", "--out", str(out)]) == 0
    assert not (out / "model.sig").exists()
    plain = tmp_path / "plain"
    assert main(["dequantize", str(made / "out"), "--out", str(plain)]) == 0
    assert not (plain / "model.sig").exists()


def test_a_signature_does_not_travel_out_of_a_folder_of_pickles(tmp_path: Path) -> None:
    import torch

    tiny_eagle3_llama(tmp_path / "draft")
    (tmp_path / "draft/model.safetensors").unlink()
    torch.save({"a": torch.ones(1)}, tmp_path / "draft/pytorch_model.bin")
    (tmp_path / "draft/model.sig").write_text("{}", encoding="utf-8")
    unpickle_draft(tmp_path / "draft", tmp_path / "out")
    assert not (tmp_path / "out/model.sig").exists()


def test_push_sends_a_signature_of_what_it_sends(made: Path, out: Path) -> None:
    given: dict[str, Any] = {"against": made / "draft", "dry_run": True}
    assert "model.sig" in push(out, "a/b", **given).files
    assert "model.sig" in push(out, "a/b", unverified=True, dry_run=True).files
    card = (out / "README.md").read_text(encoding="utf-8")
    (out / "README.md").write_text(f"{card}\nmine\n", encoding="utf-8")
    assert differences(out, read_signature(out))[0].startswith("README.md: expected sha256")
    with pytest.raises(CheckpointError, match=r"is the signature of other files, 1 difference"):
        push(out, "a/b", **given)


def test_clean_leaves_a_signature_and_takes_what_a_killed_run_left(out: Path) -> None:
    stale = out / ".model.sig.1-1-0123456789ab.staging"
    stale.mkdir()
    assert main(["clean", str(out), "--older-than", "0"]) == 0
    assert (out / "model.sig").exists()
    assert not stale.exists()
