"""C++ for the processor at hand, compiled on first use: what the engine's and the trainer's kernels share."""
