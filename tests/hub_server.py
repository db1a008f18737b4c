"""A server on this machine that speaks the part of the Hugging Face hub's protocol that fetching a model needs."""

import hashlib
import http.server
import json
import pathlib
import threading

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub(http.server.ThreadingHTTPServer):
  """Models in folders ROOT/ORGANIZATION/MODEL; those named in `private` need the token, those in `gated` too.

  Attributes:
    fetched: the names of files that were sent.
  """

  def __init__(self, root: pathlib.Path, token: str, private=(), gated=()):
    super().__init__(("127.0.0.1", 0), _Handler)
    self.root, self.token, self.private, self.gated = root, token, private, gated
    self.fetched: list[str] = []
    threading.Thread(target=self.serve_forever, daemon=True).start()

  @property
  def url(self) -> str:
    return f"http://127.0.0.1:{self.server_port}"


class _Handler(http.server.BaseHTTPRequestHandler):
  def do_HEAD(self):
    self._answer(send_body=False)

  def do_GET(self):
    self._answer(send_body=True)

  def log_message(self, *args):
    pass

  def _answer(self, send_body: bool):
    parts = self.path.partition("?")[0].strip("/").split("/")
    in_api = parts[0] == "api"
    parts = parts[2:] if in_api else parts  # after /api/models
    repository, rest = "/".join(parts[:2]), parts[2:]
    folder, allowed = self.server.root / repository, self.headers.get("Authorization") == f"Bearer {self.server.token}"
    if not folder.is_dir() or (repository in self.server.private and not allowed):
      return self._send(401 if not allowed else 404, b"", {"X-Error-Code": "RepoNotFound"})
    if not in_api and repository in self.server.gated and not allowed:
      return self._send(403, b"", {"X-Error-Code": "GatedRepo"})
    if rest[:1] == ["revision"] or not rest:
      if rest[1:] not in ([], ["main"], [COMMIT]):
        return self._send(404, b"", {"X-Error-Code": "RevisionNotFound"})
      return self._send_json({"id": repository, "sha": COMMIT, "siblings": []})
    if rest[0] == "tree":
      return self._send_json(
        [
          {"type": "file", "path": path.name, "size": path.stat().st_size, "oid": _hash(path)}
          for path in sorted(folder.iterdir())
        ]
      )
    path = folder / rest[2]  # resolve/REVISION/FILE
    headers = {"ETag": f'"{_hash(path)}"', "X-Repo-Commit": COMMIT, "Content-Length": str(path.stat().st_size)}
    if send_body:
      self.server.fetched.append(path.name)
    return self._send(200, path.read_bytes() if send_body else b"", headers)

  def _send_json(self, value):
    self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

  def _send(self, status: int, body: bytes, headers: dict[str, str]):
    self.send_response(status)
    for name, value in {"Content-Length": str(len(body)), **headers}.items():
      self.send_header(name, value)
    self.end_headers()
    self.wfile.write(body)


def _hash(path: pathlib.Path) -> str:
  return hashlib.sha1(path.read_bytes()).hexdigest()
