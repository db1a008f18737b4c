"""What a model is from inside: spectra of its weights over depth, sensitivity to each token, clustering of its states."""
