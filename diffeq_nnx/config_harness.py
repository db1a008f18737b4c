"""The keys of `harness`, downstream evaluation with lm_eval."""

from collections.abc import Sequence
import dataclasses
import os

from diffeq_nnx.config_fields import Section, number, one_of
from diffeq_nnx.errors import UserError


@dataclasses.dataclass(frozen=True)
class HarnessConfig(Section, prefix="harness."):
  """Downstream evaluation with lm_eval, as a job; no part of a run's identity."""

  tasks: str = "paper"  # names of tasks, groups or tags, separated by commas, with * and ?; the paper's list; or none
  num_fewshot: tuple[int, ...] = ()  # examples before each question, once for each number; (): for paper (0, 5), and
  # else as the tasks say
  limit: int | None = number(None, above=0)  # questions of each task, and documents of `text`; None: all
  include_path: str | None = None  # a folder of task files of your own
  default_tasks: bool = True  # whether lm_eval's own tasks are there too; reading their files takes seconds
  batch_size: int = number(8, above=0)  # sequences of model.seq_len tokens on a device at a time (more where shorter)
  dtype: str = one_of("model", "bfloat16", "float32")  # of the computation; model: as the model says
  begin_mark: str = one_of("auto", "none", "always")  # before contexts; auto: the tokenizer's begin mark if it has one;
  # always: that, or else the end mark
  window: str = one_of("disjoint", "sliding")  # over long texts
  stride: int | None = number(None, above=0)  # tokens that a sliding window predicts; None: half of model.seq_len
  text: str | None = None  # a source as in data.source, whose perplexity is measured
  folder: str = "harness"  # for the results, in the work directory

  @property
  def names(self) -> tuple[str, ...]:
    """The parts of `tasks`."""
    names = tuple(filter(None, (name.strip() for name in self.tasks.split(","))))
    return () if names == ("none",) else names

  def check(self, taken: Sequence[str]) -> None:
    """Raises UserError: keys that don't fit each other, or a folder that is one of `taken`."""
    for i, count in enumerate(self.num_fewshot):
      if count < 0:
        raise UserError(f"harness.num_fewshot[{i}]={count}: must be 0 or above")
    if self.stride is not None and self.window != "sliding":
      raise UserError(
        f"harness.stride={self.stride}: applies to sliding windows only; leave it out, or set harness.window=sliding"
      )
    first = os.path.normpath(self.folder).split(os.sep)[0]
    if os.path.isabs(self.folder) or first in ("..", ".", *taken) or "::" in self.folder or "://" in self.folder:
      raise UserError(
        f"harness.folder={self.folder!r}: must be a folder of its own within the work directory, e.g. harness"
      )
    if self.text is None and not self.names:
      raise UserError(f"harness.tasks={self.tasks!r}: there is nothing to do; name tasks, or a harness.text")
