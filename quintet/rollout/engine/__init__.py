"""The embedded engine: continuous batching over paged KV, on any device.

`rollout.numerics: fast` is `fast.py` over C++ kernels (`native/`) or plain torch (`torch_model.py`); `reproducible` is
`engine.py`, plain torch in float32 whose results do not depend on the batch. Both schedule for themselves, because
what they share differs: `fast` starts a response in a page of its own so that a prompt is stored once, `reproducible`
needs every key at its place in a block.

Left out on purpose: CUDA graphs, GPU kernels, speculative decoding. An external engine behind the same protocol is the
answer where those matter.
"""
