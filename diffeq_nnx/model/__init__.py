"""The model: time embedding, weight sources, vector fields, solvers; `Model` puts them together."""

from diffeq_nnx.model.model import Model, parameter_dtype

__all__ = ["Model", "parameter_dtype"]
