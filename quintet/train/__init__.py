"""The train worker: packed forward, optimizer, batching, checkpoints and the supervised loop."""
