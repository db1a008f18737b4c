"""Local files and folders: where they come to lie. Those of buckets are in test_buckets.py."""

import os
import pathlib

import fsspec
import pytest

from diffeq_nnx import files
from tests.conftest import told


def test_home_is_the_same_folder_for_what_is_read_and_what_is_written(tmp_path, monkeypatch):
  monkeypatch.setenv("HOME", str(tmp_path))
  monkeypatch.chdir(tmp_path)
  assert not files.exists("reference")  # a name like any other
  files.make_folder("~/a")
  files.write_json("~/a/x.json", {})
  files.move_folder("~/a", "~/b/c")
  assert files.read_json("~/b/c/x.json") == {} and files.Growing("~/b").folder == str(tmp_path / "b")
  with files.local("~/b/c/x.json") as path:
    assert path == str(tmp_path / "b" / "c" / "x.json")
  assert os.listdir(tmp_path) == ["b"]


@pytest.mark.parametrize("kind", ["link", "mount"])
def test_a_folder_that_is_a_link_or_a_mount_is_filled_where_it_leads(tmp_path, monkeypatch, kind):
  real, link = tmp_path / "real", tmp_path / "link"
  real.mkdir()
  link.symlink_to(real)
  (real / "other").write_text("x")
  if kind == "mount":
    monkeypatch.setattr(os.path, "ismount", lambda path: path == str(real))
  before = os.stat(real).st_ino
  with files.replacing_folder(str(link), "last") as place:
    for name in ("last", "first"):
      pathlib.Path(place, name).write_text(name)
  assert {*os.listdir(real)} == {"first", "last"} | ({"other"} if kind == "mount" else set())
  assert (os.stat(real).st_ino == before) == (kind == "mount") and link.is_symlink()
  assert sorted(os.listdir(tmp_path)) == ["link", "real"]


def test_a_url_is_a_name_and_no_pattern():
  fs = fsspec.filesystem("memory")
  fs.pipe({"/run1/x": b"", "/run[1]/x": b""})
  assert "name a path without" in told(lambda: files.remove("memory://run[1]"))
  assert fs.exists("/run1/x")


def test_ranges_of_files_in_several_file_systems(tmp_path):
  (tmp_path / "a").write_bytes(b"012")
  fsspec.filesystem("memory").pipe("/b", b"345")
  ranges = [(str(tmp_path / "a"), 0, 2), ("memory://b", 1, 3), (f"file://{tmp_path}/a", 1, 2)]
  assert files.read_ranges(ranges) == [b"01", b"45", b"1"]
