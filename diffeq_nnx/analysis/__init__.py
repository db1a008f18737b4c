"""Analysis of a model: spectra of its weights over depth, sensitivity to each token, clustering of its states."""
