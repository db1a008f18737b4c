"""Neural ODE Transformers (DiffEqFormer): a transformer whose depth is time, in Flax NNX."""
