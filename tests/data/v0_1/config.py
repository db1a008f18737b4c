from diffeq_nnx import config as config_lib


def get_config(choice=""):
  config = config_lib.default()
  m = config.model
  m.field = "llama" if choice == "llama" else "gpt"
  m.num_steps, m.embed_dim, m.num_heads, m.mlp_dim, m.vocab_size, m.seq_len, m.dtype = 2, 8, 2, 16, 260, 16, "float32"
  m.time.sinusoidal_dim, m.time.time_embed_dim = 4, 4
  config.data.source, config.data.validation = "text:text/*.txt", "text:text/*.txt"
  config.data.tokenizer = "bytes"
  config.data.cache_dir = "cache"
  config.train.steps, config.train.batch_size, config.train.loss_chunks = 4, 4, 2
  config.train.log_every = 1
  config.eval.every, config.eval.batch_size, config.eval.max_batches = 4, 4, 2
  config.checkpoint.every, config.checkpoint.keep = 4, 1
  if choice == "plain":
    m.weights, m.solver = "stored", "sequential"
  return config
