"""A stand-in of the Hub that takes uploads: the requests of huggingface_hub 2.4 and no others.

Repositories, branches, commits, LFS by whole files and by parts, in memory. Everything that was
asked is noted, and an answer can be replaced or held back.
"""

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import unquote

from local_http import listening

TOKEN = "hf_" + "a" * 34  # of no account: the stand-in alone knows it


@dataclass
class Repository:
    """Its branches, each name -> path -> bytes; which files are LFS; the commits in order."""

    private: bool
    branches: dict[str, dict[str, bytes]] = field(default_factory=dict)
    large: set[str] = field(default_factory=set)
    commits: list[str] = field(default_factory=list)

    def head(self, branch: str) -> str:
        """Hash of a branch."""
        state = json.dumps([branch, self.commits, sorted(self.branches[branch])])
        return hashlib.sha1(state.encode(), usedforsecurity=False).hexdigest()


@dataclass
class HubState:
    """What the stand-in holds.

    Attributes:
        stored: sha256 -> bytes of LFS.
        requests: method and path, in order.
        answers: (method, part of the path) -> status and body instead of the right answer.
        part_bytes: files of more bytes are asked for in parts of so many.
        let_through: PUTs that are answered; the others wait. None = all.
        on_put: set when one of them waits.
    """

    repositories: dict[str, Repository] = field(default_factory=dict)
    stored: dict[str, bytes] = field(default_factory=dict)
    parts: dict[str, dict[int, bytes]] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list)
    answers: dict[tuple[str, str], tuple[int, dict[str, Any]]] = field(default_factory=dict)
    part_bytes: int | None = None
    let_through: int | None = None
    on_put: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)
    damage: bool = False

    def count(self, start: str) -> int:
        """Requests that begin so."""
        return sum(request.startswith(start) for request in self.requests)


@contextmanager
def hub() -> Iterator[tuple[str, HubState]]:
    """Its address, and what it holds."""
    state = HubState()
    handler = type("Handler", (_Handler,), {"state": state})
    with listening(handler) as address:
        yield address, state


def _is_large(path: str) -> bool:
    return path.endswith(".safetensors")


def _blob(content: bytes) -> str:
    head = f"blob {len(content)}\0".encode()
    return hashlib.sha1(head + content, usedforsecurity=False).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    state: HubState
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        del format, args

    def do_GET(self) -> None:
        self._answer(b"")

    def do_POST(self) -> None:
        self._answer(self._body())

    def do_PUT(self) -> None:
        body = self._body()
        with self.state.lock:
            wait = self.state.let_through == 0
            if self.state.let_through:
                self.state.let_through -= 1
        if wait:
            self.state.on_put.set()
            threading.Event().wait(60)
            return
        self._answer(body)

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") == "chunked":
            found = b""
            while size := int(self.rfile.readline().strip() or b"0", 16):
                found += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            return found
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def _answer(self, body: bytes) -> None:
        path = unquote(self.path.partition("?")[0])
        state = self.state
        state.requests.append(f"{self.command} {path}")
        if self.command == "POST":
            state.bodies.append(body)
        for (method, part), (status, said) in state.answers.items():
            if method == self.command and part in path:
                return self._send(said, status)
        signed = path.startswith("/store/")  # addresses of the store say by themselves who asks
        if self.headers.get("Authorization") != f"Bearer {TOKEN}" and not signed:
            return self._send({"error": "Invalid username or password."}, 401)
        with state.lock:
            self._route(path, body)
        return None

    def _route(self, path: str, body: bytes) -> None:
        if path == "/api/repos/create":
            return self._create(json.loads(body))
        if path == "/api/validate-yaml":
            return self._send({"errors": [], "warnings": []})
        if path.startswith("/store/"):
            return self._store(path, body)
        if path.endswith(".git/info/lfs/objects/batch"):
            return self._batch(json.loads(body))
        if path.startswith("/api/models/"):
            owner, name, *rest = path.removeprefix("/api/models/").split("/", 3)
            repository = self.state.repositories.get(f"{owner}/{name}")
            if repository is None:
                return self._send({"error": "Repository not found"}, 404, "RepoNotFound")
            verb, revision = (*rest, "", "")[:2] if rest else ("", "")
            if "/" in revision and verb in ("tree",):
                revision = revision.partition("/")[0]
            return self._of(repository, verb, revision or "main", body)
        return self._send({"error": f"no route {path}"}, 404)

    def _create(self, asked: dict[str, Any]) -> None:
        owner = asked["organization"] or "someone"
        name = f"{owner}/{asked['name']}"
        url = {"url": f"http://{self.headers['Host']}/{name}"}
        if name in self.state.repositories:
            return self._send({**url, "error": "You already created this model repo"}, 409)
        private = asked.get("visibility") == "private" or bool(asked.get("private"))
        made = Repository(private=private, branches={"main": {".gitattributes": b"*.bin lfs\n"}})
        self.state.repositories[name] = made
        return self._send(url)

    def _of(self, repository: Repository, verb: str, revision: str, body: bytes) -> None:
        if verb == "branch":
            if revision in repository.branches:
                return self._send({"error": "exists"}, 409)
            repository.branches[revision] = dict(repository.branches["main"])
            return self._send({})
        if revision not in repository.branches:
            return self._send({"error": f"Invalid rev id: {revision}"}, 404, "RevisionNotFound")
        files = repository.branches[revision]
        if verb in ("", "revision"):
            sha = repository.head(revision)
            return self._send({"id": "x/y", "sha": sha, "private": repository.private})
        if verb == "tree":
            return self._send([_entry(p, c, p in repository.large) for p, c in files.items()])
        if verb == "preupload":
            return self._send({"files": [_mode(each["path"], files) for each in
                                         json.loads(body)["files"]]})  # fmt: skip
        if verb == "commit":
            return self._commit(repository, revision, body)
        return self._send({"error": f"no verb {verb}"}, 404)

    def _commit(self, repository: Repository, branch: str, body: bytes) -> None:
        header, *operations = [json.loads(line) for line in body.splitlines()]
        parent = header["value"].get("parentCommit")
        if parent is not None and parent != repository.head(branch):
            return self._send({"error": "The branch was updated meanwhile"}, 412)
        files = repository.branches[branch]
        for each in operations:
            value = each["value"]
            if each["key"] == "lfsFile":
                files[value["path"]] = self.state.stored[value["oid"]]
                repository.large.add(value["path"])
            else:
                files[value["path"]] = base64.b64decode(value["content"])
        repository.commits.append(header["value"]["summary"])
        sha = repository.head(branch)
        place = f"http://{self.headers['Host']}/x/y/commit/{sha}"
        return self._send({"commitOid": sha, "commitUrl": place})

    def _batch(self, asked: dict[str, Any]) -> None:
        objects = []
        for each in asked["objects"]:
            oid, size = each["oid"], each["size"]
            found: dict[str, Any] = {"oid": oid, "size": size}
            if oid not in self.state.stored:
                found["actions"] = {"upload": self._upload_of(oid, size)}
            objects.append(found)
        self._send({"transfer": "basic", "objects": objects})

    def _upload_of(self, oid: str, size: int) -> dict[str, Any]:
        place = f"http://{self.headers['Host']}/store/{oid}"
        length = self.state.part_bytes
        if length is None or size <= length:
            return {"href": place}
        numbers = range(1, -(-size // length) + 1)
        parts = {f"{number:05}": f"{place}/{number}" for number in numbers}
        return {"href": place, "header": {"chunk_size": str(length), **parts}}

    def _store(self, path: str, body: bytes) -> None:
        oid, _, number = path.removeprefix("/store/").partition("/")
        if self.command == "POST":  # all parts are there
            parts = self.state.parts.pop(oid)
            body = b"".join(parts[each["partNumber"]] for each in json.loads(body)["parts"])
        elif number:
            self.state.parts.setdefault(oid, {})[int(number)] = body
            return self._send({}, etag=number)
        if hashlib.sha256(body).hexdigest() != oid:
            return self._send({"error": "other bytes"}, 400)
        self.state.stored[oid] = body[:-1] + b"x" if self.state.damage else body
        return self._send({})

    def _send(self, value: Any, status: int = 200, code: str = "", etag: str = "") -> None:
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        if code:
            self.send_header("X-Error-Code", code)
        if status >= 400:
            self.send_header("X-Error-Message", value.get("error", ""))
        if etag:
            self.send_header("ETag", etag)
        self.end_headers()
        self.wfile.write(body)


def _entry(path: str, content: bytes, large: bool) -> dict[str, Any]:
    entry = {"type": "file", "path": path, "size": len(content), "oid": _blob(content)}
    if large:
        sha256 = hashlib.sha256(content).hexdigest()
        entry["lfs"] = {"oid": sha256, "size": len(content), "pointerSize": 134}
    return entry


def _mode(path: str, files: dict[str, bytes]) -> dict[str, Any]:
    large = _is_large(path)
    found = {"path": path, "uploadMode": "lfs" if large else "regular", "shouldIgnore": False}
    if path in files:
        content = files[path]
        found["oid"] = hashlib.sha256(content).hexdigest() if large else _blob(content)
    return found
