"""Scoring of packed requests: shared beginnings, order and padding change nothing but rounding."""

import numpy as np
import pytest

from diffeq_nnx.harness import packing, scoring
from diffeq_nnx.harness.packing import Request
from tests.harness_cases import by_number, one_by_one, random_model, trees


@pytest.fixture(scope="module")
def model():
  return random_model()


@pytest.fixture(scope="module")
def scorer(model):
  return scoring.Scorer(model)


@pytest.mark.parametrize("field,solver,kv_heads", [("gpt", "euler", 2), ("llama", "sequential", 1)])
def test_sharing_a_beginning_changes_nothing(field, solver, kv_heads, x64, monkeypatch):
  monkeypatch.setattr(scoring, "QUERIES", 12)  # attention in several parts
  model = random_model(field, solver=solver, dtype="float64", num_kv_heads=kv_heads, seq_len=32)
  requests = trees(8, longest=32)
  rows = packing.make_rows(requests, 32)
  assert len(rows) < 0.7 * len(requests) and any(row.branches for row in rows) and not all(row.branches for row in rows)
  expected = one_by_one(model, requests)
  for share in (True, False):
    found = by_number(scoring.Scorer(model, batch_size=32, share=share), requests)
    np.testing.assert_allclose(found[0], expected[0], rtol=0, atol=1e-9)
    assert found[1] == expected[1]


def test_order_changes_nothing_and_batches_only_rounding(model, scorer, monkeypatch):
  requests, small = trees(12, longest=20), scoring.Scorer(model, batch_size=1)  # batches of several shapes
  expected = by_number(small, requests)
  order = np.random.default_rng(1).permutation(len(requests))
  found = by_number(small, [requests[i] for i in order])
  assert (found[0] == expected[0][order]).all() and found[1] == [expected[1][i] for i in order]
  together = by_number(scorer, requests)
  np.testing.assert_allclose(together[0], expected[0], rtol=0, atol=2e-5)
  assert together[1] == expected[1]
  monkeypatch.setattr(scoring, "LOGITS", 1 << 12)  # logits in many pieces
  np.testing.assert_allclose(by_number(scorer, requests)[0], expected[0], rtol=0, atol=2e-5)


def test_few_shapes_are_compiled():
  rows = packing.make_rows(trees(400), 96)
  shapes = {tuple(array.shape for array in batch.arrays.values()) for batch in packing.make_batches(rows, 1024, 1)}
  assert len(rows) > 300 and len(shapes) < 20


def test_equal_requests_are_computed_once_and_rows_hold_no_more_than_fits(model):
  scorer, requests = scoring.Scorer(model), trees(4)
  shapes, score = [], scorer._score
  scorer._score = lambda batch: (shapes.append(batch.arrays["slots"].shape), score(batch))[1]
  expected = by_number(scorer, requests)
  found = by_number(scorer, requests * 40)
  np.testing.assert_array_equal(found[0], np.tile(expected[0], 40))
  assert shapes[: len(shapes) // 2] == shapes[len(shapes) // 2 :]
  many = [Request((1,), (2, i)) for i in range(257)] + [Request((1,), (i,)) for i in range(257)]
  assert all(len(row.scored) <= 96 and len(row.tokens) <= 96 for row in packing.make_rows(many, 96))
