"""What every test runs under: the CPU, one thread, shared compilations, and a small model to build on."""

import dataclasses
import functools
import gc
import importlib
import os
import pathlib
import shutil
import tempfile

# XLA's older way to compile fused loops takes a fifth of the time of the newer one (jax 0.10.2 and 0.11.2); versions
# that lack it ignore the option. A program is compiled in one piece, since a worker has one core: a tenth less time.
XLA_FLAGS = (
  "--xla_cpu_multi_thread_eigen=false --xla_cpu_parallel_codegen_split_count=1"
  " --xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters"
)
# Set before JAX is imported by the process that starts the workers of pytest-xdist; all subprocesses inherit it.
STARTS_THE_TESTS = "DIFFEQ_NNX_IN_TESTS" not in os.environ
if STARTS_THE_TESTS:
  # Where it is set and an installer compiled nothing, each of some hundred processes would compile JAX's modules anew.
  os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
  os.environ |= {
    "DIFFEQ_NNX_IN_TESTS": "1",
    "JAX_PLATFORMS": "cpu",
    "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",  # tests compile more than they compute
    "XLA_FLAGS": XLA_FLAGS,
    "OMP_NUM_THREADS": "1",  # a worker has one core
    # threads of XLA: an interpreted GPU kernel's warpgroups wait for each other, each in a thread of its own
    "NPROC": "8",
    # compiled programs, shared by all processes of this run of the tests and by no other run
    "JAX_COMPILATION_CACHE_DIR": tempfile.mkdtemp(prefix="compiled-for-tests-"),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.1",  # to keep a smaller one takes a third of its time
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "HF_HOME": tempfile.mkdtemp(prefix="home-of-tests-"),
    # subprocesses import this checkout, installed or not
    "PYTHONPATH": os.pathsep.join(filter(None, [str(pathlib.Path(__file__).parents[1]), os.environ.get("PYTHONPATH")])),
  }
# where transformers copies a folder's own code, for each worker
os.environ["HF_MODULES_CACHE"] = tempfile.mkdtemp(dir=os.environ.get("HF_HOME"))

from absl import flags, logging
from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from diffeq_nnx import config as config_lib
from diffeq_nnx import data, main
from diffeq_nnx.config import Config, ModelConfig, TimeConfig
from diffeq_nnx.data.preparation import workers
from diffeq_nnx.errors import UserError
from diffeq_nnx.model.model import Model
from diffeq_nnx.model.parameters import abstract_model, build, params_of
from diffeq_nnx.parallel.sharding import make_mesh
from diffeq_nnx.runs.run import Run, load_corpus
from diffeq_nnx.training.loop import train
from diffeq_nnx.training.step import place_state
from tests import reference

jax.config.update("jax_numpy_rank_promotion", "raise")

# Files that take longest, first: a worker that begins one late would keep the other waiting.
LONGEST = """distributed docs real demo buckets launch attention compile_ahead resume generation attention_compile
  train_step import_job finetune analysis export rank_steps elastic sharding distillation analyze_job adapters harness
  run harness_adapter speculation adaptive decode_kernel solvers model chat_jobs depth_order pages""".split()


def pytest_collection_modifyitems(items):
  """The longest files first."""
  place = {f"test_{name}.py": number for number, name in enumerate(LONGEST)}
  items.sort(key=lambda item: place.get(item.path.name, len(place)))


def pytest_xdist_auto_num_workers():
  """One more than there are cores: tests also wait, for processes, files and clocks."""
  return workers.num_cores() + 1  # up to --maxprocesses


def pytest_unconfigure():
  """Removes the compiled programs of this run, and what packages of Hugging Face kept."""
  if STARTS_THE_TESTS:
    for name in ("JAX_COMPILATION_CACHE_DIR", "HF_HOME"):
      shutil.rmtree(os.environ[name], ignore_errors=True)


# changes to a ModelConfig by the names of presets, and those of solvers that no preset has
PRESETS = {name: {"solver": name} for name in config_lib.choices("model.solver")[2:]} | {
  "diffeq": {},
  "published": {"initialization": "published", "horizon": 1.0},
  "baseline": {"weights": "stored", "solver": "sequential"},
  "shared": {"weights": "shared"},
  "shared_sequential": {"weights": "shared", "solver": "sequential"},
  "constant": {"time": TimeConfig(sinusoidal_dim=6, time_embed_dim=5, constant=True)},
  "learned": {"time": TimeConfig(sinusoidal_dim=6, time_embed_dim=5, embedding="learned")},
  "shared_mlp": {"time": TimeConfig(sinusoidal_dim=6, time_embed_dim=5, embedding="shared_mlp")},
  "uniform": {"time": TimeConfig(sinusoidal_dim=6, time_embed_dim=5, embedding="uniform")},
}


def small_model(**changes) -> ModelConfig:
  """A model that runs in milliseconds: 3 steps, width 24, 4 query and 2 key/value heads."""
  sizes = dict(num_steps=3, embed_dim=24, num_heads=4, num_kv_heads=2, mlp_dim=40, vocab_size=31, seq_len=12)
  values = dict(dtype="float32", time=TimeConfig(sinusoidal_dim=6, time_embed_dim=5))
  return ModelConfig(**{**sizes, **values, **changes})


@functools.cache
def small_instance(config: ModelConfig) -> Model:
  """A model of this config as training starts it; jitted, since making the arrays one by one compiles for seconds."""
  params = jax.jit(lambda: nnx.to_pure_dict(nnx.state(Model(config, rngs=nnx.Rngs(0)))))()
  return build(config, params)


def small_config(model: ModelConfig | None = None, **train) -> Config:
  """A whole experiment around `small_model`."""
  values = dict(batch_size=4, loss_chunks=3, remat="none", steps=10)
  return Config(model=model or small_model(), train=config_lib.TrainConfig(**{**values, **train}))


def change(config: Config, **sections) -> Config:
  """The config with keys of its sections changed, as in `change(config, train={"steps": 28})`."""
  made = {name: dataclasses.replace(getattr(config, name), **keys) for name, keys in sections.items()}
  return dataclasses.replace(config, **made)


def on_eight_devices(program: str) -> None:
  """Runs a program on eight virtual devices; apart, since a process has its number of devices for good."""
  from tests.processes import Process  # which starts the server that it forks from

  flags_of_eight = f"{XLA_FLAGS} --xla_force_host_platform_device_count=8"
  process = Process([], {"XLA_FLAGS": flags_of_eight}, f"{program}\nraise SystemExit")
  assert process.end() == 0, process.lines[-40:]


def random_batch(config: Config, seed: int = 0) -> dict[str, np.ndarray]:
  """Random inputs and targets [batch_size, seq_len]."""
  shape = (2, config.train.batch_size, config.model.seq_len)
  tokens = np.random.default_rng(seed).integers(config.model.vocab_size, size=shape).astype(np.int32)
  return {"inputs": tokens[0], "targets": tokens[1]}


def masked_batch(config: Config, seed: int = 0) -> dict[str, np.ndarray]:
  """The same, where the first 12, 0, 1, 5, 0, 0, 4, 0 targets of eight rows count, and so on."""
  batch = random_batch(config, seed)
  counts_Bx1 = np.resize([12, 0, 1, 5, 0, 0, 4, 0], (config.train.batch_size, 1))
  return {**batch, "mask": (np.arange(config.model.seq_len) < counts_Bx1).astype(np.float32)}


def packed_batch(config: Config, seed: int = 0) -> dict[str, np.ndarray]:
  """The same, with documents kept apart: token 0 ends each, at two random places of a row."""
  batch = random_batch(config, seed)
  ends_Bx2 = np.random.default_rng(seed).integers(config.model.seq_len, size=(config.train.batch_size, 2))
  np.put_along_axis(batch["inputs"], ends_Bx2, 0, axis=1)
  return {**batch, **data.find_documents(batch["inputs"], eos_id=0)}


def perturb(tree, seed: int = 0, scale: float = 0.1):
  """Adds noise to every array, so that no bias, norm or F_0 has its initial value; in NumPy, without compiling."""
  rng = np.random.default_rng(seed)
  return jax.tree.map(lambda a: np.asarray(a) + (scale * rng.normal(size=a.shape)).astype(a.dtype), tree)


@functools.cache
def _shapes(config: ModelConfig, x64: bool):
  """The shapes and dtypes of a model's parameters, which depend on whether float64 is on."""
  return params_of(abstract_model(config))


def moved_instance(config: ModelConfig, seed: int = 0, scale: float = 0.1) -> Model:
  """A model of which no parameter sits at its initial value; made in NumPy, which compiles nothing."""
  rng = np.random.default_rng(seed)

  def value(path, leaf):
    names = [key.key for key in path]
    spread, start = scale, 0.0
    if names[-1] == "frequencies_M":
      start = reference.fixed_frequencies(*leaf.shape)
    elif names[-1] == "scale" and "generator" not in names:
      start = 1.0
    elif "time_mlp" in names and len(leaf.shape) == 3:  # as large as they start, so that e(t) is
      spread += leaf.shape[1] ** -0.5
    return jnp.asarray(start + spread * rng.normal(size=leaf.shape), leaf.dtype)

  return build(config, jax.tree_util.tree_map_with_path(value, _shapes(config, jax.config.jax_enable_x64)))


def equal(found, expected, atol: float = 0.0, rtol: float = 0.0) -> None:
  """Checks trees of arrays; to the last bit, unless a tolerance is given."""
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=atol), found, expected)


def weights_of(model: Model, grid=None):
  """`model.block_weights`, compiled as one program: its operations one by one compile for seconds."""
  return jax.jit(lambda: model.block_weights(grid))()


leaves_coroutines = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


class Lazy:
  """A package that is imported at its first use: each worker reads all files of tests, and runs some of them."""

  def __init__(self, name: str):
    self._name = name

  def __getattr__(self, attribute: str):
    if attribute.startswith("_"):  # pytest looks for such marks on all that a file of tests holds
      raise AttributeError(attribute)
    return getattr(importlib.import_module(self._name), attribute)


class Stop(Exception):
  """Raised by a test where nothing that follows is looked at."""


def told(call, kind: type[Exception] = UserError) -> str:
  """The one line of the error of this kind that a call raises."""
  with pytest.raises(kind) as caught:
    call()
  message = str(caught.value)
  assert "\n" not in message and message
  return message


def run_command(*arguments: str) -> int:
  """The exit code of a command line, run in this process as in a new one."""
  flags.FLAGS.unparse_flags()
  for name in flags.FLAGS:
    flags.FLAGS[name].unparse()
  try:
    return main.main(main.parse(["main", *arguments]))
  except SystemExit as stop:
    return stop.code


def mistake(arguments: list[str], capsys) -> tuple[int, str]:
  """(exit code, the one line on stderr) of a command line that holds a mistake, run in this process."""
  capsys.readouterr()
  code = run_command(*arguments)
  (line,) = capsys.readouterr().err.splitlines()
  return code, line


@pytest.fixture(scope="module")
def optimizations():
  """The compiler as users have it; other tests switch most optimizations off.

  Nothing is kept for other processes, since jax 0.12 can't read a program again for a device that isn't there.
  """
  before = jax.config.jax_persistent_cache_min_compile_time_secs
  jax.config.update("jax_disable_most_optimizations", False)
  jax.config.update("jax_persistent_cache_min_compile_time_secs", 3600)
  yield
  jax.config.update("jax_disable_most_optimizations", True)
  jax.config.update("jax_persistent_cache_min_compile_time_secs", before)


@pytest.fixture(autouse=True, scope="module")
def released():
  """What a file of tests compiled is given back at its end: it adds up to gigabytes."""
  yield
  jax.clear_caches()
  gc.collect()


@pytest.fixture(autouse=True)
def verbosity():
  """How much absl logs is as before after each test: the main program changes it."""
  before = logging.get_verbosity()
  yield
  logging.set_verbosity(before)


@pytest.fixture
def x64():
  """float64 for one test."""
  with jax.enable_x64(True):
    yield


def run_config(folder, steps=20, **optimizer) -> Config:
  """A run of a second: 20 steps, validation and checkpoints every 4."""
  return Config(
    model=small_model(num_steps=2, embed_dim=16, vocab_size=300, seq_len=16),
    data=config_lib.DataConfig(source=f"text:{folder}/*.txt", validation_fraction=0.3, cache_dir=f"{folder}/cache"),
    optimizer=config_lib.OptimizerConfig(peak_rate=1e-2, **optimizer),
    train=config_lib.TrainConfig(steps=steps, batch_size=4, remat="none", loss_chunks=4, log_every=5, peak_tflops=0.1),
    eval=config_lib.EvalConfig(every=4, batch_size=4, max_batches=2),
    checkpoint=config_lib.CheckpointConfig(every=4, keep=2),
  )


def write_documents(folder) -> None:
  """Twelve text files for `run_config`."""
  for i in range(12):
    (folder / f"{i}.txt").write_text(f"Document {i} tells of rivers, hills and rain. " * (20 + i))


def write_run(config: Config, workdir, tokenizer=None, source=None) -> str:
  """Writes a run at step 0 as `train` begins it, but with other parameters; with `tokenizer` it has no text.

  `source` is as for `Run.create`.
  """
  corpus, mesh = None if tokenizer else load_corpus(config), make_mesh(config.mesh)
  with jax.set_mesh(mesh):
    state = place_state(config, params_of(moved_instance(config.model)), mesh)
    Run.create(config, str(workdir), tokenizer or corpus.tokenizer, corpus, state, source=source)
  return str(workdir)


@pytest.fixture(scope="session")
def finished(tmp_path_factory):
  """(config, work directory) of a run of 20 steps; not to be changed."""
  folder = tmp_path_factory.mktemp("text")
  write_documents(folder)
  workdir = folder / "run"
  train(run_config(folder), str(workdir))
  return run_config(folder), workdir
