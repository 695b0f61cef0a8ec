"""Drafts from the Hub: a real download from a server on loopback, and Hubs that do not answer."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest
from draftquant.quantize.files.hub import resolve_draft
from draftquant.recipes.errors import CheckpointError, visible
from tiny import tiny_eagle3_llama

COMMIT = "0123456789abcdef0123456789abcdef01234567"
REPOSITORY = "someone/tiny-draft"


class Hub(BaseHTTPRequestHandler):
    """The routes that snapshot_download uses: revision, tree and file."""

    folder: Path
    asked: ClassVar[list[str]] = []

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        self.asked.append(path)
        names = sorted(file.name for file in self.folder.iterdir())
        api = f"/api/models/{REPOSITORY}"
        if path in (f"{api}/revision/main", f"{api}/revision/v1"):
            self._json(
                {"id": REPOSITORY, "sha": COMMIT, "siblings": [{"rfilename": n} for n in names]}
            )
        elif path == f"{api}/tree/{COMMIT}":
            sizes = {name: (self.folder / name).stat().st_size for name in names}
            self._json([{"type": "file", "path": n, "size": sizes[n], "oid": n} for n in names])
        elif path.rpartition("/")[0] == f"/{REPOSITORY}/resolve/{COMMIT}":
            self._send((self.folder / path.rpartition("/")[2]).read_bytes())
        else:
            self._send(b"", status=404)

    do_HEAD = do_GET  # noqa: N815

    def _json(self, value: object) -> None:
        self._send(json.dumps(value).encode())

    def _send(self, body: bytes, status: int = 200) -> None:
        self.send_response(status)
        for name, value in (
            ("Content-Length", str(len(body))),
            ("X-Repo-Commit", COMMIT),
            ("ETag", f'"{hash(body) & 0xFFFFFFFF:x}"'),
        ):
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        del format, args


@pytest.fixture
def endpoint(tmp_path: Path) -> Iterator[str]:
    handler = type("Served", (Hub,), {"folder": tiny_eagle3_llama(tmp_path / "served")})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def resolved(reference: str, cache: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Resolve in a process of its own: huggingface_hub reads its environment once."""
    code = """
import sys
from draftquant.recipes.errors import CheckpointError
from draftquant.quantize.files.hub import resolve_draft
try:
    found = resolve_draft(sys.argv[1])
    print(found.folder, found.hub_id, found.revision)
except CheckpointError as exc:
    sys.exit(str(exc))
"""
    return subprocess.run(
        [sys.executable, "-c", code, reference],
        env=os.environ | {"HF_HOME": str(cache), "HF_HUB_DISABLE_XET": "1"} | environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,  # it ends by itself
    )


def test_download_pins_the_commit(endpoint: str, tmp_path: Path) -> None:
    Hub.asked.clear()
    run = resolved(f"{REPOSITORY}@v1", tmp_path / "cache", HF_ENDPOINT=endpoint)
    assert run.returncode == 0, run.stderr
    assert f"/api/models/{REPOSITORY}/revision/v1" in Hub.asked
    folder, hub_id, commit = run.stdout.split()
    assert (hub_id, commit) == (REPOSITORY, COMMIT)
    served = {path.name: path.read_bytes() for path in (tmp_path / "served").iterdir()}
    assert {path.name: path.read_bytes() for path in Path(folder).iterdir()} == served


def test_no_network(tmp_path: Path) -> None:
    run = resolved(REPOSITORY, tmp_path / "cache", HF_HUB_OFFLINE="1")
    assert run.returncode == 1
    why = "there is no such folder, and HF_HUB_OFFLINE forbids a download: "
    assert run.stderr.startswith(f"{REPOSITORY}: {why}")
    assert "\n  fix: unset HF_HUB_OFFLINE and check the" in run.stderr
    assert "Traceback" not in run.stderr


@pytest.mark.parametrize(
    "reference", ["nonsense", "a/b/c", "/absent/folder", "owner/name@", "../x", "a b/c", "\n"]
)
def test_neither_folder_nor_hub_id(
    reference: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(CheckpointError) as caught:
        resolve_draft(reference)
    assert caught.value.where == visible(reference)
    assert caught.value.what == "no such folder"
    assert "give a draft folder or a Hub id (owner/name)" in caught.value.fix


@pytest.mark.parametrize("reference", ["owner--x/name", "owner/na..me", "ä/b", "owner/name.git"])
def test_hub_id_that_the_hub_forbids(reference: str) -> None:
    with pytest.raises(
        CheckpointError, match=r"the Hub did not deliver it: .*\n  fix: check the spel"
    ):
        resolve_draft(reference)
