"""A headless Chromium for the tests, driven by Playwright."""

from collections.abc import Iterator
import contextlib
import pathlib
import shutil
from typing import Any

import pytest


@contextlib.contextmanager
def chromium() -> Iterator[Any]:
  """A `playwright.sync_api.Browser`; skips the test where there is no Playwright or no Chromium."""
  playwright = pytest.importorskip("playwright.sync_api")
  found = [path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))]
  if not found:
    pytest.skip("no Chromium is installed")
  with playwright.sync_playwright() as driver:
    browser = driver.chromium.launch(executable_path=found[0])
    yield browser
    browser.close()


@contextlib.contextmanager
def opened(browser: Any, path: str, width: int = 1280, mobile: bool = False) -> Iterator[Any]:
  """A `playwright.sync_api.Page` with this file; at the end fails if the page logged anything or requested more."""
  address = pathlib.Path(path).resolve().as_uri()
  context = browser.new_context(viewport={"width": width, "height": 844}, is_mobile=mobile, has_touch=mobile)
  page, seen = context.new_page(), []
  page.on("console", lambda message: seen.append(message.text))
  page.on("pageerror", lambda error: seen.append(str(error)))
  page.on("request", lambda request: seen.append(request.url))
  page.goto(address)
  yield page
  context.close()
  assert seen == [address], seen
