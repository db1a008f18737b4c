"""A server on this machine that speaks the part of the Hugging Face hub's protocol that models and data sets need."""

import contextlib
import hashlib
import http.server
import json
import pathlib
import threading
import urllib.parse

from huggingface_hub import constants
import pytest

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub(http.server.ThreadingHTTPServer):
  """Models or data sets in folders ROOT/ORGANIZATION/NAME; org/private and org/gated need the token "secret".

  Attributes:
    fetched: the names of files that were sent.
    commit: the one that the branch `main` is at.
  """

  def __init__(self, root: pathlib.Path):
    super().__init__(("127.0.0.1", 0), _Handler)
    self.root, self.commit = root, COMMIT
    self.fetched: list[str] = []
    threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()  # seconds until it notices its end

  @property
  def url(self) -> str:
    return f"http://127.0.0.1:{self.server_port}"


@contextlib.contextmanager
def serving(root: pathlib.Path, cache: pathlib.Path):
  """Makes this hub that of huggingface_hub, which has no token."""
  server = Hub(root)
  with pytest.MonkeyPatch.context() as patched:
    for name, value in {
      "ENDPOINT": server.url,
      "HF_HUB_OFFLINE": False,
      "HUGGINGFACE_CO_URL_TEMPLATE": server.url + "/{repo_id}/resolve/{revision}/{filename}",
      "HF_HUB_CACHE": str(cache),
    }.items():
      patched.setattr(constants, name, value)
    patched.delenv("HF_TOKEN", raising=False)
    yield server
  server.shutdown()
  server.server_close()


class _Handler(http.server.BaseHTTPRequestHandler):
  def do_HEAD(self):
    self._answer(send_body=False)

  def do_GET(self):
    self._answer(send_body=True)

  def do_POST(self):
    body = urllib.parse.parse_qs(self.rfile.read(int(self.headers["Content-Length"])).decode())
    self._answer(send_body=True, wanted=body["paths"])

  def log_message(self, *args):
    pass

  def _answer(self, send_body: bool, wanted: list[str] | None = None):
    parts = urllib.parse.unquote(self.path.partition("?")[0]).strip("/").split("/")
    in_api = parts[0] == "api"
    parts = parts[2:] if in_api else parts[parts[0] == "datasets" :]  # after /api/models, /api/datasets, /datasets
    repository, rest, commit = "/".join(parts[:2]), parts[2:], self.server.commit
    folder, allowed = self.server.root / repository, self.headers.get("Authorization") == "Bearer secret"
    gated = repository == "org/gated"
    if not folder.is_dir() or (repository == "org/private" and not allowed):
      return self._send(401 if not allowed else 404, b"", {"X-Error-Code": "RepoNotFound"})
    if (not in_api or rest == ["auth-check"]) and gated and not allowed:
      return self._send(403, b"", {"X-Error-Code": "GatedRepo"})
    if rest == ["auth-check"]:
      return self._send(200, b"", {})
    if rest[:1] == ["revision"] or not rest:
      if rest[1:] not in ([], ["main"], [commit]):
        return self._send(404, b"", {"X-Error-Code": "RevisionNotFound"})
      return self._send_json({"id": repository, "sha": commit, "gated": gated and "manual", "siblings": []})
    if rest[0] in ("tree", "paths-info"):
      top = folder.joinpath(*rest[2:])
      found = [folder / name for name in wanted] if wanted else [*top.rglob("*")] if top.is_dir() else []
      return self._send_json([_describe(path, folder) for path in sorted(found) if path.exists()])
    path = folder.joinpath(*rest[2:])  # resolve/REVISION/FILE
    if not path.is_file():
      return self._send(404, b"", {"X-Error-Code": "EntryNotFound"})
    content = path.read_bytes()
    start, _, last = self.headers.get("Range", "bytes=0-").removeprefix("bytes=").partition("-")
    part = content[int(start) : int(last) + 1 if last else None]
    headers = {"ETag": f'"{_hash(path)}"', "X-Repo-Commit": commit, "Content-Length": str(len(part))}
    if "Range" in self.headers:
      headers["Content-Range"] = f"bytes {start}-{int(start) + len(part) - 1}/{len(content)}"
    if send_body:
      self.server.fetched.append(path.name)
    return self._send(206 if "Range" in self.headers else 200, part if send_body else b"", headers)

  def _send_json(self, value):
    self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

  def _send(self, status: int, body: bytes, headers: dict[str, str]):
    self.send_response(status)
    for name, value in {"Content-Length": str(len(body)), **headers}.items():
      self.send_header(name, value)
    self.end_headers()
    self.wfile.write(body)


def _describe(path: pathlib.Path, folder: pathlib.Path) -> dict:
  name = path.relative_to(folder).as_posix()
  if path.is_dir():
    return {"type": "directory", "path": name, "oid": "0" * 40}
  return {"type": "file", "path": name, "size": path.stat().st_size, "oid": _hash(path)}


def _hash(path: pathlib.Path) -> str:
  return hashlib.sha1(path.read_bytes()).hexdigest()
