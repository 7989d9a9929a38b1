"""The embedded engine: continuous batching over a paged KV cache, in plain torch, on any device.

Left out on purpose: CUDA graphs, custom kernels, chunked prefill, speculative decoding, a prefix cache that
outlives a request. An external engine behind the same protocol is the answer where those matter.
"""
