"""`draftquant push`: against a stand-in of the Hub that takes uploads as huggingface_hub does."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from draftquant.quantize.errors import CheckpointError, HubError, VerifyError
from draftquant.quantize.files.hub_upload import upload_files
from draftquant.scripts.api.push import push
from draftquant.scripts.cli import main
from hub_server import TOKEN, HubState, Repository, hub
from huggingface_hub import constants
from tiny import tiny_eagle3_llama

REPOSITORY = "someone/tiny-int4"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A draft of two shards, and its INT4 folder with a card for the Hub."""
    folder = tmp_path_factory.mktemp("push")
    draft, out = tiny_eagle3_llama(folder / "draft", sharded=True), folder / "out"
    assert main(["quantize", str(draft), "--recipe", "int4-channel", "--out", str(out)]) == 0
    card = ["--base-model", "someone/tiny", "--license", "mit", "--name", REPOSITORY]
    readme = str(out / "README.md")
    assert main(["card", str(out), *card, "--out", readme, "--overwrite"]) == 0
    return folder


@pytest.fixture
def out(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made / "out", tmp_path / "out"))


@pytest.fixture
def served() -> Iterator[tuple[str, HubState]]:
    with hub() as found:
        yield found


def environment(address: str, home: Path, **more: str) -> dict[str, str]:
    """huggingface_hub reads it once, when it is imported. Xet is a protocol of its own."""
    mine = {"HF_ENDPOINT": address, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1",
            "HF_TOKEN": TOKEN}  # fmt: skip
    return {**os.environ, **mine, **more}


def command(made: Path, out: Path, *options: str) -> list[str]:
    against = ["--against", str(made / "draft")]
    start = [sys.executable, "-m", "draftquant.scripts.cli", "push", str(out), REPOSITORY]
    return [*start, *against, *options]


class Said(NamedTuple):
    """What the command said."""

    returncode: int
    stdout: str
    stderr: str


class Pusher:
    """Runs the command here, with what huggingface_hub read of the environment put right."""

    def __init__(
        self, made: Path, out: Path, address: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        self._arguments = command(made, out)[3:]
        self._address, self._capsys = address, capsys

    def __call__(self, *options: str, **more: str) -> Said:
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(constants, "ENDPOINT", self._address)
            patched.setattr(constants, "HF_HUB_DISABLE_XET", True)
            patched.setenv("HF_TOKEN", more.get("HF_TOKEN", TOKEN))
            patched.setattr(constants, "HF_TOKEN_PATH", "/nowhere")
            self._capsys.readouterr()
            code = main([*self._arguments, *options])
        found = self._capsys.readouterr()
        assert TOKEN not in found.out + found.err
        return Said(code, found.out, found.err)


class PusherOfItsOwn:
    """Runs the command in a process of its own."""

    def __init__(self, made: Path, out: Path, home: Path, address: str) -> None:
        self._made, self._out, self._home, self._address = made, out, home, address

    def __call__(self, *options: str, **more: str) -> subprocess.CompletedProcess[str]:
        found = subprocess.run(
            command(self._made, self._out, *options),
            env=environment(self._address, self._home, **more),
            capture_output=True,
            text=True,
            check=False,
            timeout=600,  # it ends by itself
        )
        assert TOKEN not in found.stdout + found.stderr
        assert "Traceback" not in found.stderr
        return found

    def start(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            command(self._made, self._out),
            env=environment(self._address, self._home),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )


@pytest.fixture
def pusher(
    made: Path,
    out: Path,
    served: tuple[str, HubState],
    capsys: pytest.CaptureFixture[str],
) -> Pusher:
    return Pusher(made, out, served[0], capsys)


@pytest.fixture
def own_pusher(
    made: Path, out: Path, tmp_path: Path, served: tuple[str, HubState]
) -> PusherOfItsOwn:
    return PusherOfItsOwn(made, out, tmp_path / "home", served[0])


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


# ---- what arrives


@pytest.mark.parametrize("part_bytes", [None, 20_000])
def test_bytes_arrive_as_they_are(
    part_bytes: int | None,
    pusher: Pusher,
    own_pusher: PusherOfItsOwn,
    out: Path,
    served: tuple[str, HubState],
) -> None:
    address, state = served
    state.part_bytes = part_bytes
    before = contents(out)
    run = own_pusher("--json") if part_bytes is None else pusher("--json")
    assert run.returncode == 0, run.stderr
    said = json.loads(run.stdout)
    repository = state.repositories[REPOSITORY]
    there = dict(repository.branches["main"])
    del there[".gitattributes"]
    assert there == before == contents(out)
    assert repository.private
    assert (said["verified"], said["private"], said["upload"]["url"]) == (
        True, True, f"{address}/{REPOSITORY}",
    )  # fmt: skip
    assert said["files"] == {name: len(content) for name, content in before.items()}
    assert sorted(said["upload"]["sent"]) == sorted(before)
    assert repository.commits == ["Upload a quantized draft, verified"]
    assert all(TOKEN.encode() not in content for content in there.values())
    assert all(TOKEN.encode() not in body for body in state.bodies)
    again = pusher()
    assert again.returncode == 0
    assert "0 sent, all compared" in again.stdout
    assert len(repository.commits) == 1


def test_public_and_a_branch(pusher: Pusher, served: tuple[str, HubState]) -> None:
    run = pusher("--public", "--revision", "int4")
    assert run.returncode == 0, run.stderr
    repository = served[1].repositories[REPOSITORY]
    assert not repository.private
    assert set(repository.branches["main"]) == {".gitattributes"}
    assert "README.md" in repository.branches["int4"]
    assert "(public): " in run.stdout


def test_an_upload_that_was_killed_goes_on(
    pusher: Pusher, own_pusher: PusherOfItsOwn, out: Path, served: tuple[str, HubState]
) -> None:
    state = served[1]
    state.let_through = 1
    process = own_pusher.start()
    assert state.on_put.wait(60)
    while len(state.stored) < 1:
        assert process.poll() is None
    process.send_signal(signal.SIGKILL)
    process.wait()
    repository = state.repositories[REPOSITORY]
    assert repository.commits == []  # nobody sees a half of it
    assert len(state.stored) == 1
    state.let_through = None
    done = set(state.stored)
    state.requests.clear()
    assert pusher().returncode == 0
    (first,) = done
    assert state.count(f"PUT /store/{first}") == 0
    assert state.count("PUT /store/") == 1
    there = dict(repository.branches["main"])
    del there[".gitattributes"]
    assert there == contents(out)


# ---- what is not sent


def test_a_dry_run_asks_nothing(pusher: Pusher, out: Path, served: tuple[str, HubState]) -> None:
    run = pusher("--dry-run", HF_TOKEN="")
    assert run.returncode == 0, run.stderr
    assert served[1].requests == []
    for name, content in contents(out).items():
        assert name in run.stdout
        assert f"{len(content):,}" in run.stdout
    assert "vLLM 0.33.0: H200 (sm90) LOADS" in run.stdout
    assert "nothing was sent (--dry-run)" in run.stdout


def test_no_token(pusher: Pusher, served: tuple[str, HubState]) -> None:
    run = pusher(HF_TOKEN="")
    assert run.returncode == 2
    assert f"{REPOSITORY}: there is no token of the Hub" in run.stderr
    assert "\n  fix: run 'hf auth login', or set" in run.stderr
    assert served[1].requests == []


ANSWERS = {
    401: ("the Hub does not know the token", "hf auth login"),
    403: ("the token may not write there", "a repository of your own"),
    500: ("the Hub answers with status 500", "run the same command again"),
}


@pytest.mark.parametrize("status", ANSWERS)
def test_a_hub_that_refuses(status: int, pusher: Pusher, served: tuple[str, HubState]) -> None:
    said = {"error": f"no, {TOKEN}"}
    served[1].answers["POST", "/api/repos/create"] = status, said
    served[1].answers["GET", "/api/models"] = status, said
    run = pusher()
    what, fix = ANSWERS[status]
    assert run.returncode == 2
    assert f"{REPOSITORY}: {what}: " in run.stderr
    assert fix in run.stderr.partition("fix: ")[2]


def test_a_hub_that_does_not_answer(
    made: Path, out: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with hub() as (address, _):
        pass
    offline = PusherOfItsOwn(made, out, tmp_path / "home", address)(HF_HUB_OFFLINE="1")
    for run in (Pusher(made, out, address, capsys)(), offline):
        assert run.returncode == 2
        assert f"{REPOSITORY}: the Hub does not answer: " in run.stderr
        assert "fix: check the network, HF_ENDPOINT and HF_HUB_OFFLINE" in run.stderr


def test_a_card_that_the_hub_refuses(pusher: Pusher, served: tuple[str, HubState]) -> None:
    errors = {"errors": [{"message": '"license" must be one of'}], "warnings": []}
    served[1].answers["POST", "/api/validate-yaml"] = 400, errors
    run = pusher()
    assert run.returncode == 2
    assert (
        'the Hub refuses the upload: Invalid metadata in README.md. - "license" must' in run.stderr
    )
    assert served[1].repositories[REPOSITORY].commits == []


def test_a_repository_with_other_files(pusher: Pusher, served: tuple[str, HubState]) -> None:
    branches = {"main": {"model-00003.safetensors": b"stale"}}
    served[1].repositories[REPOSITORY] = Repository(private=True, branches=branches)
    run = pusher("--overwrite")
    assert run.returncode == 2
    assert "model-00003.safetensors: it is in the repository but not in the folder" in run.stderr
    assert served[1].count("PUT") == 0


def test_a_repository_with_other_contents(
    pusher: Pusher, out: Path, served: tuple[str, HubState]
) -> None:
    files = {"config.json": b"{}", ".gitattributes": b"mine"}
    repository = Repository(private=True, branches={"main": files})
    served[1].repositories[REPOSITORY] = repository
    run = pusher()
    assert run.returncode == 2
    assert f"{REPOSITORY}: config.json: its contents in the repository differ" in run.stderr
    assert "fix: pass --overwrite to replace them" in run.stderr
    assert repository.commits == []
    assert pusher("--overwrite").returncode == 0
    assert files["config.json"] == (out / "config.json").read_bytes()
    assert files[".gitattributes"] == b"mine"


@pytest.mark.parametrize("private", [True, False])
def test_a_repository_that_others_see_or_not(
    private: bool, pusher: Pusher, served: tuple[str, HubState]
) -> None:
    repository = Repository(private=private, branches={"main": {}})
    served[1].repositories[REPOSITORY] = repository
    run = pusher(*(["--public"] if private else []))
    is_, asked = ("private", "public") if private else ("public", "private")
    assert run.returncode == 2
    assert f"exists and is {is_}, expected a {asked} one" in run.stderr
    assert repository.branches == {"main": {}}


def test_somebody_else_commits_meanwhile(pusher: Pusher, served: tuple[str, HubState]) -> None:
    served[1].answers["POST", "/commit/"] = 412, {"error": "The branch was updated"}
    run = pusher()
    assert run.returncode == 2
    assert "the repository changed meanwhile, and nothing was committed" in run.stderr


def test_a_file_that_is_not_taken(pusher: Pusher, served: tuple[str, HubState]) -> None:
    served[1].answers["PUT", "/store/"] = 403, {"error": f"expired {TOKEN}"}
    run = pusher()
    assert run.returncode == 2
    assert f"{REPOSITORY}: Error while uploading 'model-0000" in run.stderr
    assert "403" in run.stderr
    assert served[1].repositories[REPOSITORY].commits == []


def test_bytes_that_arrive_otherwise(pusher: Pusher, served: tuple[str, HubState]) -> None:
    served[1].damage = True
    run = pusher()
    assert run.returncode == 2
    assert "the file on the Hub differs from the file that was sent" in run.stderr


# ---- what is refused before


def test_what_does_not_verify_is_not_sent(made: Path, out: Path) -> None:
    with pytest.raises(VerifyError, match="is not verified: no source is given"):
        push(out, REPOSITORY)
    with pytest.raises(VerifyError, match="a source is given"):
        push(out, REPOSITORY, against=made / "draft", unverified=True)
    config = json.loads((out / "config.json").read_text(encoding="utf-8"))
    (out / "config.json").write_text(json.dumps(config | {"rope_theta": 1}), encoding="utf-8")
    with pytest.raises(VerifyError, match=r"does not verify against .*1 fault(?s:.*)rope_theta"):
        push(out, REPOSITORY, against=made / "draft", dry_run=True)
    arguments = ["push", str(out), REPOSITORY, "--against", str(made / "draft"), "--dry-run"]
    assert main(arguments) == 1
    assert push(out, REPOSITORY, unverified=True, dry_run=True).verified is False


@pytest.mark.parametrize("repository", ["none", "a/b/c", "a/b@main", "", "a b/c"])
def test_what_is_no_repository(repository: str, out: Path) -> None:
    with pytest.raises(HubError, match="expected a Hub id"):
        push(out, repository, unverified=True, dry_run=True)


@pytest.mark.parametrize(
    "card", ["", "# mine\n", "---\nlicense: mit\nbase_model: a/b\n---\n# as released\n"]
)
def test_the_card_of_a_source_is_not_enough(card: str, out: Path) -> None:
    (out / "README.md").write_text(card, encoding="utf-8")
    with pytest.raises(HubError, match="is no card of a quantized draft") as caught:
        push(out, REPOSITORY, unverified=True, dry_run=True)
    assert caught.value.fix.startswith(f'card("{out}", out=')


def test_files_that_cannot_be_uploaded(out: Path, tmp_path: Path) -> None:
    (out / ".cache").mkdir()
    (out / ".cache" / "noted").write_text("x", encoding="utf-8")
    assert ".cache/noted" not in upload_files(out)
    (out / ".gitignore").write_text("*.safetensors", encoding="utf-8")
    with pytest.raises(CheckpointError, match="is hidden"):
        push(out, REPOSITORY, unverified=True, dry_run=True)
    (out / ".gitignore").unlink()
    (tmp_path / "secret").write_text("x", encoding="utf-8")
    (out / "notes.txt").symlink_to(tmp_path / "secret")
    with pytest.raises(CheckpointError, match="elsewhere"):
        push(out, REPOSITORY, unverified=True, dry_run=True)


@pytest.mark.parametrize("file", [".env", ".ssh/id", "tokenizer/.netrc"])
def test_hidden_files_are_never_sent(file: str, made: Path, out: Path, tmp_path: Path) -> None:
    source = Path(shutil.copytree(made / "draft", tmp_path / "source"))
    for folder in (out, source):  # also where the source has the file, and quantize copied it
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_text("TOKEN=x", encoding="utf-8")
    for options in ({"unverified": True}, {"against": source}):
        with pytest.raises(CheckpointError, match="it is hidden: it may hold"):
            push(out, REPOSITORY, dry_run=True, **options)  # type: ignore[arg-type]


NOBODYS = ("id_rsa", "key.pem", "ssh/id", "notes.txt", "sub/tokenizer.json", "x.py", "train.csv")


def test_without_a_source_only_files_of_drafts_are_sent(
    out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    known = {"LICENSE", "tokenizer.json", "modeling_x.py", "mask_embedding.pt", ".gitattributes"}
    for file in known:
        (out / file).write_text("x", encoding="utf-8")
    assert known <= push(out, REPOSITORY, unverified=True, dry_run=True).files.keys()
    for file in NOBODYS:
        (out / file).parent.mkdir(exist_ok=True)
        (out / file).write_text("x", encoding="utf-8")
    assert main(["push", str(out), REPOSITORY, "--unverified", "--dry-run"]) == 2
    said = capsys.readouterr().err
    assert f"{len(NOBODYS)} file(s) that no draft is known to have" in said
    assert all(f"  {file}\n" in said for file in NOBODYS)
    with pytest.raises(CheckpointError, match="no draft is known to have"):
        push(out, REPOSITORY, unverified=True)  # before the Hub is asked


def test_with_its_source_a_file_belongs_to_the_source(
    made: Path, out: Path, tmp_path: Path
) -> None:
    source = Path(shutil.copytree(made / "draft", tmp_path / "source"))
    for folder in (out, source):
        (folder / "notes.txt").write_text("x", encoding="utf-8")
    assert "notes.txt" in push(out, REPOSITORY, against=source, dry_run=True).files
