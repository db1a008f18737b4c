"""Which buckets can hold checkpoints: those at gs://, and those at s3:// after a change to orbax.

orbax treats a bucket as one (a file that commits a checkpoint in place of a rename, a driver of tensorstore) only where
its path begins with gs://, and has no setting for others. Four of its internal names are therefore replaced, once a
run's directory is at s3://; where a release of orbax lacks one of them, a work directory there is refused.
"""

import functools
import os
from typing import Any

from diffeq_nnx.errors import UserError

PREFIXES = ("gs://", "s3://")


def check(workdir: str, flag: str = "workdir") -> None:
  """Checks that a work directory can hold checkpoints, and lets orbax write them where it is at s3://.

  Raises:
    UserError: it is in a bucket of another kind, or at s3:// and the installed orbax is not as expected.
  """
  if "://" in workdir and not workdir.startswith(PREFIXES):
    raise UserError(f"{flag}={workdir}: orbax can't keep checkpoints there; name a disk, gs://... or s3://...")
  if workdir.startswith("s3://"):
    try:
      _teach_orbax()
    except (AttributeError, ImportError) as error:
      raise UserError(
        f"{flag}={workdir}: the installed orbax-checkpoint can't be made to write s3:// ({error}); install version "
        "0.12.8, or name a disk or gs://..."
      ) from error


@functools.cache
def _teach_orbax() -> None:
  from orbax.checkpoint._src.path import gcs_utils  # takes seconds
  from orbax.checkpoint._src.serialization import tensorstore_utils

  normalized, of_gcs = tensorstore_utils._normalize_path, gcs_utils.get_kvstore_for_gcs
  changes = {
    (gcs_utils, "_GCS_PATH_PREFIX"): PREFIXES,
    (gcs_utils, "get_kvstore_for_gcs"): lambda path: _store(path) if path.startswith("s3://") else of_gcs(path),
    (tensorstore_utils, "_use_gcs_driver"): lambda directory: directory.startswith(PREFIXES),
    (tensorstore_utils, "_normalize_path"): lambda path: normalized(path).replace("s3:/", "s3://"),
  }
  [getattr(module, name) for module, name in changes]  # all or none
  for (module, name), value in changes.items():
    setattr(module, name, value)


def _store(path: str) -> dict[str, Any]:
  """tensorstore's description of a path at s3://; unlike s3fs it does not read the variables of a server's address."""
  bucket, _, key = path.removeprefix("s3://").partition("/")
  variables = {
    "endpoint": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"),
    "aws_region": ("AWS_REGION", "AWS_DEFAULT_REGION"),
  }
  found: dict[str, Any] = {"driver": "s3", "bucket": bucket, "path": key}
  for field, names in variables.items():
    if value := next(filter(None, map(os.environ.get, names)), None):
      found[field] = value
  if os.environ.get("AWS_ACCESS_KEY_ID"):  # else it complains on stderr of files in ~/.aws that are not there
    found["aws_credentials"] = {"type": "environment"}
  return found
