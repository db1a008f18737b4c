"""Clustering of simulated tokens that attention alone moves: a Markdown table, scales of the weights by their growth.

  python -m launch.experiments.clusters

The simulation follows Tong et al. 2025, appendix C.8. With constant weights tokens cluster, as theory predicts for
weights shared over depth (Geshkovski et al. 2023). The table holds the share of pairs of tokens whose states point in
the same direction at the end, as means over 50 draws of weights and states with standard errors.

L tokens, D dimensions, N draws.
"""

from collections.abc import Iterable

import numpy as np

from diffeq_nnx.analysis.clustering import clustered_share
from launch.experiments import tables

NUM_TOKENS, DIM = 40, 3
STEP, TIME = 0.1, 20.0  # of Euler's method: 200 steps
SEEDS = range(50)
ORDERS = (0, 1, 2, 3, 4)
SCALES = {  # of the polynomial of order k: its name, and its value at t = TIME
  "(t / T)^k, which ends at 1": lambda order: 1.0,
  "(k + 1)(t / T)^k, of mean 1": lambda order: order + 1.0,
  "t^k": lambda order: TIME**order,
}


def simulate(order: int, end: float, seeds: Iterable[int]) -> np.ndarray:
  """x <- x + step Attention(standardized x), with random weights times p(t) = end (t / T)^order, [steps + 1, N, L, D].

  W_qk = A A^T p(t)^2 and W_v = V p(t), where A and V [D, D] are normal and constant. The state x starts uniform in
  [-2, 2]. Every token attends to all tokens, and the softmax has no scale.

  Args:
    order: of the polynomial; 0 means constant weights.
    end: its value at the end.
    seeds: of A, V and x, one for each draw, the same for every order.
  """
  generators = [np.random.default_rng(seed) for seed in seeds]
  a_NxDxD, v_NxDxD = np.stack([rng.normal(size=(2, DIM, DIM)) for rng in generators], axis=1)
  states = [np.stack([rng.uniform(-2, 2, (NUM_TOKENS, DIM)) for rng in generators])]
  for t in STEP * np.arange(round(TIME / STEP)):
    x_NxLxD, size = states[-1], end * (t / TIME) ** order
    variance_NxLx1 = x_NxLxD.var(-1, keepdims=True)
    normed_NxLxD = (x_NxLxD - x_NxLxD.mean(-1, keepdims=True)) / np.sqrt(variance_NxLx1 + 1e-5)
    compared_NxLxD = normed_NxLxD @ a_NxDxD * size
    scores_NxLxL = compared_NxLxD @ compared_NxLxD.swapaxes(1, 2)
    shares_NxLxL = np.exp(scores_NxLxL - scores_NxLxL.max(-1, keepdims=True))
    shares_NxLxL /= shares_NxLxL.sum(-1, keepdims=True)
    states.append(x_NxLxD + STEP * shares_NxLxL @ normed_NxLxD @ v_NxDxD * size)
  return np.stack(states)


def main() -> None:
  """Simulates every scale and order, and prints the table."""
  measure = lambda order, end: tables.mean_and_error(clustered_share(simulate(order, end, SEEDS)[-1]).tolist(), ".2f")
  rows = [[name, *(measure(order, end(order)) for order in ORDERS)] for name, end in SCALES.items()]
  print(tables.markdown(["weights", "constant (k = 0)", *(f"k = {order}" for order in ORDERS[1:])], rows))


if __name__ == "__main__":
  main()
