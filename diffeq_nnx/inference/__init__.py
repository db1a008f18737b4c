"""Text generation: decoding with a cache, sampling, and streams of text."""
