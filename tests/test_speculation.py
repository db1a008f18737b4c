"""Self-speculation: the deep model's tokens if greedy, its distribution otherwise, and no loss where all is kept."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import diffeq_nnx
from diffeq_nnx.inference import speculation
from diffeq_nnx.inference.sampling import GenerationOptions
from tests.conftest import moved_instance, small_model
from tests.test_generation import PROMPTS, check_drawn


def made(decoder, draft, prompts, row_numbers=None, draft_tokens=2, **options):
  """(the new tokens of each prompt, tokens kept in each round)."""
  ids, kept = [[] for _ in prompts], []
  take = lambda n, token: ids[n].append(token)
  options = GenerationOptions(draft_tokens=draft_tokens, **options)
  ended = speculation.speculate(decoder, draft, prompts, options, take, row_numbers=row_numbers, on_round=kept.append)
  assert dict(ended) == dict.fromkeys(range(len(prompts)), "length")
  return ids, kept


def test_greedy_tokens_are_those_of_the_deep_model(x64):
  """Of three prompts together: some rounds keep more drafted tokens than others, and a text ends where positions do."""
  model = moved_instance(small_model(dtype="float64", horizon=1.0, num_steps=2))
  deep, draft = diffeq_nnx.Decoder(model), diffeq_nnx.Decoder(model, 1)
  found, kept = made(deep, draft, PROMPTS, max_tokens=10, temperature=0)
  assert found == diffeq_nnx.generate(deep, PROMPTS, max_tokens=10, temperature=0)
  assert [len(ids) for ids in found] == [10, 7, 10] and len({*kept}) > 1


def test_drawn_tokens_do_not_depend_on_other_rows_and_a_draft_by_the_model_itself_is_always_kept(x64):
  """Rows keep different numbers of drafted tokens, and end at different times.

  Two models of one size share all programs, so one takes the place of the other at fewer steps.
  """
  config = small_model(dtype="float64", num_steps=1, field="llama", solver="sequential")
  deep, draft = (diffeq_nnx.Decoder(moved_instance(config, seed=seed)) for seed in range(2))
  prompts, made_so, options = [*PROMPTS, [7, 7]], [], {"draft_tokens": 1, "top_p": 0.7, "top_k": 9, "seed": 1}
  for order in ([0, 1, 2, 3], [2, 0, 3, 1]):
    found, kept = made(deep, draft, [prompts[n] for n in order], order, max_tokens=10, rows=2, **options)
    made_so.append((sorted(zip(order, found)), sorted(kept)))
  assert made_so[0] == made_so[1] and len({*kept}) > 1
  options["max_tokens"] = 60  # past the slots that a prompt and its text would need
  found, kept = made(draft, draft, PROMPTS[:2], **options)
  assert found == diffeq_nnx.generate(draft, PROMPTS[:2], **options) and {*kept} == {1}


@pytest.mark.parametrize("how", [{}, {"temperature": 0.7, "top_k": 4, "top_p": 0.8}])
def test_tokens_have_the_deep_model_s_distribution(how):
  """Of many rows, each judged alone: the first new token, and the second where the first was kept."""
  count, V = 20_000, 6
  rng = np.random.default_rng(0)
  logits = draft, deep = [jnp.asarray(rng.normal(size=(size, V)), jnp.float32) for size in (2, 3)]
  sampler = GenerationOptions(**how).make_sampler(range(count))

  def row(key):
    alone = dataclasses.replace(sampler, key_B=key[None])
    tokens = [alone.draw(draft[i : i + 1], jnp.array([5 + i])) for i in range(2)]
    return speculation.verify_drafts(alone, jnp.stack(tokens, 1), *(x[None] for x in logits), jnp.array([5]))

  shares_of = jax.jit(sampler.compute_shares)
  new, kept = jax.jit(jax.vmap(row))(sampler.key_B)
  new, kept = np.asarray(new)[:, 0], np.asarray(kept)[:, 0]
  assert {*kept} == {0, 1, 2}
  for place, rows in ((0, kept >= 0), (1, kept >= 1), (2, kept >= 2)):
    left = np.asarray(shares_of(np.asarray(deep)[place][None]))[0]
    check_drawn(new[rows, place], left)
