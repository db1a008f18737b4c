"""A headless Chromium driven over two pipes, with nothing but the standard library.

The commands and events are those of the Chrome DevTools Protocol, as JSON that ends in a NUL byte; the browser reads
them from its file descriptor 3 and writes to 4. Every wait has an end.
"""

import base64
import json
import os
import pathlib
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from typing import Any

_NAMES = ("chromium", "chromium-browser", "google-chrome")
_FLAGS = ("--headless", "--disable-gpu", "--no-first-run", "--disable-background-networking",
          "--disable-component-update", "--disable-sync", "--disable-extensions", "--disable-default-apps",
          "--mute-audio", "--hide-scrollbars",
          "--disable-dev-shm-usage", "--remote-debugging-pipe")
# gives the browser its two descriptors by number; forking a process that has run JAX, to do it there, would warn
_STARTER = """
import fcntl, os, sys
read, write = (fcntl.fcntl(int(number), fcntl.F_DUPFD_CLOEXEC, 10) for number in sys.argv[1:3])
os.dup2(read, 3), os.dup2(write, 4)
os.execvp(sys.argv[3], sys.argv[3:])
"""


def find() -> str | None:
  """The path of a browser, or None."""
  return next(filter(None, map(shutil.which, _NAMES)), None)


class BrowserError(Exception):
  """The browser refused a command, ended, or took too long."""


class Browser:
  """One browser with one page, to be used in a `with` statement; at its end the browser is gone.

  Attributes:
    messages: (level, text) of what the page has put on the console, and of what the browser said about it there;
      an exception that nothing caught has the level "exception".
    requests: The addresses that the page has asked for, `data:` and `blob:` ones left out; they are in memory.
  """

  def __init__(self, seconds: float = 30):
    """Starts the browser; no wait, for one answer or one load, takes longer than `seconds`."""
    self._seconds, self._last, self._session, self._received = seconds, 0, None, b""
    self._events: list[dict[str, Any]] = []
    self.messages: list[tuple[str, str]] = []
    self.requests: list[str] = []
    self._directory = tempfile.mkdtemp(prefix="browser")
    read, self._write = os.pipe()
    self._read, write = os.pipe()
    root = ["--no-sandbox"] if os.geteuid() == 0 else []
    self._process = subprocess.Popen(
        [sys.executable, "-S", "-E", "-c", _STARTER, str(read), str(write), find(), *_FLAGS, *root,
         f"--user-data-dir={self._directory}", "about:blank"],
        pass_fds=(read, write), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        start_new_session=True)
    os.close(read)
    os.close(write)

  def __enter__(self) -> "Browser":
    try:
      target = self.call("Target.createTarget", url="about:blank")["targetId"]
      self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
      for domain in ("Page", "Runtime", "Network", "Log"):
        self.call(f"{domain}.enable")
    except BaseException:
      self.__exit__()
      raise
    return self

  def __exit__(self, *unused) -> None:
    for descriptor in (self._read, self._write):
      os.close(descriptor)
    try:
      os.killpg(self._process.pid, signal.SIGKILL)  # its own group: the session that it was started in
    except ProcessLookupError:
      pass
    self._process.wait(self._seconds)
    shutil.rmtree(self._directory, ignore_errors=True)

  def call(self, method: str, **params: Any) -> dict[str, Any]:
    """Gives a command of the protocol and waits for its answer.

    Raises:
      BrowserError: If the browser refuses, ends, or doesn't answer in time.
    """
    self._last += 1
    command = {"id": self._last, "method": method, "params": params}
    if self._session:
      command["sessionId"] = self._session
    try:
      os.write(self._write, json.dumps(command).encode() + b"\0")
    except BrokenPipeError as error:
      raise BrowserError(f"{method}: the browser has ended") from error
    answer = self._wait(method, lambda message: message.get("id") == self._last)
    if "error" in answer:
      raise BrowserError(f"{method}: {answer['error']['message']}")
    return answer["result"]

  def open(self, path: str, width: int = 1280, height: int = 900, mobile: bool = False, scheme: str = "light") -> None:
    """Opens a file in a window of this size and waits until it has loaded; forgets messages and requests before."""
    self.resize(width, height, mobile)
    self.prefer(scheme)
    self.messages, self.requests, self._events = [], [], []
    self.call("Page.navigate", url=pathlib.Path(path).resolve().as_uri())
    if not any(event["method"] == "Page.loadEventFired" for event in self._events):
      self._wait("load", lambda message: message.get("method") == "Page.loadEventFired")
    self.evaluate("document.fonts.ready.then(() => true)")

  def resize(self, width: int, height: int, mobile: bool = False) -> None:
    """Sets the size of the window in pixels, and whether it is a telephone's, with fingers in place of a mouse."""
    self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=mobile)
    self.call("Emulation.setTouchEmulationEnabled", enabled=mobile)

  def prefer(self, scheme: str, medium: str = "") -> None:
    """Has the page know a preference for a "light" or "dark" scheme, and perhaps a medium such as "print"."""
    self.call("Emulation.setEmulatedMedia", media=medium, features=[{"name": "prefers-color-scheme", "value": scheme}])

  def evaluate(self, expression: str) -> Any:
    """The value of a JavaScript expression as JSON takes it; a promise is waited for.

    Raises:
      BrowserError: With its message, if it throws.
    """
    answer = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True,
                       timeout=1000 * self._seconds)
    if "exceptionDetails" in answer:
      details = answer["exceptionDetails"]
      raise BrowserError(details.get("exception", {}).get("description") or details["text"])
    return answer["result"].get("value")

  def until(self, expression: str, seconds: float = 15) -> Any:
    """Evaluates until the value is true, and returns it; an element counts as none, having no JSON.

    Raises:
      BrowserError: If it doesn't become true in time.
    """
    end = time.monotonic() + seconds
    while not (value := self.evaluate(expression)):
      if time.monotonic() > end:
        raise BrowserError(f"not true after {seconds} s: {expression}")
      time.sleep(0.03)
    return value

  def point(self, x: float, y: float) -> None:
    """Moves the mouse to a place of the window."""
    self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

  def tap(self, x: float, y: float) -> None:
    """Taps with a finger."""
    self.call("Input.synthesizeTapGesture", x=round(x), y=round(y), gestureSourceType="touch")

  def drag(self, x: float, y: float, distance: float) -> None:
    """Draws a finger upwards over so many pixels."""
    self.call("Input.dispatchTouchEvent", type="touchStart", touchPoints=[{"x": x, "y": y}])
    for part in range(1, 11):
      self.call("Input.dispatchTouchEvent", type="touchMove", touchPoints=[{"x": x, "y": y - distance * part / 10}])
    self.call("Input.dispatchTouchEvent", type="touchEnd", touchPoints=[])

  def press(self, key: str) -> None:
    """Presses a key that has a name, such as Tab."""
    code = {"Tab": 9, "Escape": 27, "End": 35, "ArrowRight": 39}[key]
    for kind in ("keyDown", "keyUp"):
      self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code)

  def screenshot(self, path: str) -> None:
    """Saves what the window shows as a PNG file."""
    with open(path, "wb") as file:
      file.write(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))

  def _wait(self, what: str, is_it) -> dict[str, Any]:
    """Takes messages until one is it."""
    end = time.monotonic() + self._seconds
    while True:
      while b"\0" in self._received:
        line, self._received = self._received.split(b"\0", 1)
        message = json.loads(line)
        self._note(message)
        if is_it(message):
          return message
      if not select.select([self._read], [], [], max(0.0, end - time.monotonic()))[0]:
        raise BrowserError(f"{what}: no answer in {self._seconds} s")
      if not (piece := os.read(self._read, 1 << 20)):
        raise BrowserError(f"{what}: the browser has ended")
      self._received += piece

  def _note(self, message: dict[str, Any]) -> None:
    """Keeps what an event says."""
    if "method" not in message:
      return
    self._events.append(message)
    method, params = message["method"], message.get("params", {})
    if method == "Runtime.consoleAPICalled":
      said = (str(one.get("value", one.get("description"))) for one in params["args"])
      self.messages.append((params["type"], " ".join(said)))
    elif method == "Runtime.exceptionThrown":
      details = params["exceptionDetails"]
      self.messages.append(("exception", details.get("exception", {}).get("description") or details["text"]))
    elif method == "Log.entryAdded":
      self.messages.append((params["entry"]["level"], params["entry"]["text"]))
    elif method == "Network.requestWillBeSent" and not params["request"]["url"].startswith(("data:", "blob:")):
      self.requests.append(params["request"]["url"])
