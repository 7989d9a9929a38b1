"""Llama-style decoders in our own arithmetic, one forward for both sides: the embedded engine samples with it, and in
`rollout.numerics: reproducible` the trainer computes with it what the engine computed, bit for bit."""
