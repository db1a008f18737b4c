"""Operations with more than one implementation, one folder each; imported as `diffeq_nnx.kernels`."""
