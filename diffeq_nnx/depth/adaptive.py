"""Steps of sizes that follow the solver's own estimate of its error: short ones where the state moves unsteadily.

B batch, L positions, M pairs of steps, n steps.
"""

from collections.abc import Sequence
import dataclasses
import math
import operator

import jax
import jax.numpy as jnp
import numpy as np

from diffeq_nnx.config import ModelConfig
from diffeq_nnx.model import grids
from diffeq_nnx.model.attention_context import Packing
from diffeq_nnx.model.model import Model, parameter_dtype

MAX_DENSITY = 8.0  # the density of steps stays between 1/8 and 8 times its mean
ORDERS = (1.0, 4.0)  # between which `order` lies


def on_grid(config: ModelConfig, steps: int | Sequence[float]) -> ModelConfig:
  """The model on another grid over its horizon: a number of steps of one size, or the size of each."""
  if isinstance(steps, int):
    if steps == config.num_steps and not config.step_sizes:
      return config
    return dataclasses.replace(config, num_steps=steps, step_sizes=(), depth_order=(), horizon=config.total_time)
  sizes = tuple(map(float, steps))
  if sizes == config.step_sizes:
    return config
  return dataclasses.replace(config, num_steps=len(sizes), step_sizes=sizes, depth_order=(), horizon=None)


def local_errors(model: Model, batch: dict[str, jax.Array], num_pairs: int) -> jax.Array:
  """An estimate, by step doubling, of the error of each of M equal steps, in units of the final state's size, [M].

  From each state at a multiple of h it takes one step of size h and two of size h/2, with a fresh carry. For order p
  they differ by (1 - 2^-p) C h^(p+1) + O(h^(p+2)), as in Richardson's extrapolation (Hairer, Norsett and Wanner 1993,
  section II.4). The first step of leapfrog is Euler's, so the estimate for leapfrog is that of Euler's method.

  Args:
    model: with weights that are not stored.
    batch: as for validation, with a mask of the tokens that count.
    num_pairs: M.
  """
  context = Packing(batch.get("segment_ids"), batch.get("positions"))
  solver, wide = model.solver, parameter_dtype(model.config.dtype)
  fine, coarse = (grids.make_grid(on_grid(model.config, n)) for n in (2 * num_pairs, num_pairs))
  step, stride = (model.make_step(grid, context) for grid in (fine, coarse))
  steps, strides = (model.links_of(model.block_weights(grid)) for grid in (fine, coarse))
  mask_BxLx1 = batch["mask"][..., None].astype(wide)
  square = lambda x_BxLxD: (jnp.square(x_BxLxD.astype(wide)) * mask_BxLx1).sum()

  def pair(carry, links):
    two, whole = links
    first, second = (jax.tree.map(operator.itemgetter(i), two) for i in range(2))
    x_BxLxD = solver.read(carry)
    two_BxLxD = solver.read(step(step(solver.init(x_BxLxD), first), second))
    one_BxLxD = solver.read(stride(solver.init(x_BxLxD), whole))
    error = jnp.sqrt(square(one_BxLxD.astype(wide) - two_BxLxD.astype(wide)))
    return step(step(carry, first), second), error

  pairs = jax.tree.map(lambda leaf: leaf.reshape(num_pairs, 2, *leaf.shape[1:]), steps)
  carry = solver.init(model.embed(batch["inputs"], context.positions_BxL))
  carry, errors_M = jax.lax.scan(pair, carry, (pairs, strides))
  return errors_M / jnp.sqrt(square(solver.read(carry)))


def order(errors_M: np.ndarray, errors_half: np.ndarray) -> float:
  """p of a method whose errors of one step are C(t) h^(p+1): their sum falls by 2^p where h is halved.

  Limited to `ORDERS`: weights that vary faster than the steps follow, or rounding, hide the order.

  Args:
    errors_M: of M steps.
    errors_half: of M / 2 steps.
  """
  sums = float(np.sum(errors_half)), float(np.sum(errors_M))
  if not (min(sums) > 0 and math.isfinite(sum(sums))):
    return ORDERS[0]
  return float(np.clip(math.log2(sums[0] / sums[1]), *ORDERS))


def graded_sizes(
  errors_M: np.ndarray, p: float, num_steps: int, horizon: float, grading: float = 1.0
) -> tuple[float, ...]:
  """Sizes of n steps that would all have the same error, in the units of the horizon, to which they add up, [n].

  A step of size h at time t has the error C(t) h^(p+1), so equal errors are equal integrals of C^(1/(p+1)) over the
  steps (de Boor 1973, "Good approximation by splines with variable knots"). C is constant within each of the M steps
  whose errors are known. This density of steps is first limited by `MAX_DENSITY`, so that sizes differ by its square at
  most.

  Args:
    errors_M: from `local_errors`; where they are not all finite, or all 0, the sizes are equal.
    p: the order, above 0.
    num_steps: n.
    horizon: the sum of the sizes.
    grading: an exponent of the density; below 1 the sizes lie between equal errors and, at 0, equal sizes. The estimate
      leaves out how later steps damp or amplify an error.
  """
  density_M = np.asarray(errors_M, np.float64) ** (grading / (p + 1))
  if not (np.isfinite(density_M).all() and density_M.any()):
    density_M = np.ones(len(density_M))
  density_M = np.clip(density_M / density_M.mean(), 1 / MAX_DENSITY, MAX_DENSITY)
  shares = np.concatenate([[0.0], np.cumsum(density_M)]) / density_M.sum()
  edges = np.interp(np.linspace(0, 1, num_steps + 1), shares, np.linspace(0, 1, len(shares)))
  return tuple((np.diff(edges) * horizon).tolist())
