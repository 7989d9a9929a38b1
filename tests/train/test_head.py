"""Log-probabilities and entropies in chunks: equal to autograd's on full logits, in chunk-sized memory."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from quintet.algorithms.kl import full_kl
from quintet.train.head import HeadConfig, LogitTransform, distribution_kl, token_logprobs

VOCAB, HIDDEN, ROWS = 37, 8, 11


def run(config: HeadConfig, entropy_weight: float, full: bool) -> list[torch.Tensor]:
    """[logprobs, entropy, d hidden, d weight, d bias] by full logits and autograd, or by the chunked head."""
    torch.manual_seed(3)
    head = nn.Linear(HIDDEN, VOCAB)
    hidden = torch.randn(ROWS, HIDDEN, requires_grad=True)
    target, weight = torch.randint(VOCAB, (ROWS,)), torch.randn(2, ROWS)
    if full:
        z = head(hidden) * config.transform.scale
        if config.transform.softcap is not None:
            z = config.transform.softcap * torch.tanh(z / config.transform.softcap)
        logp = (z / config.temperature).log_softmax(-1)
        logprobs, entropy = logp.gather(1, target[:, None])[:, 0], -(logp.exp() * logp).sum(-1)
    else:
        logprobs, entropy = token_logprobs(hidden, head, target, config)
    loss = (logprobs * weight[0]).sum()
    if entropy_weight:
        loss = loss + entropy_weight * (entropy * weight[1]).sum()
    loss.backward()
    return [logprobs.detach(), entropy.detach(), hidden.grad, head.weight.grad, head.bias.grad]


@pytest.mark.parametrize("chunk", [1, 4, 11, 64])
@pytest.mark.parametrize("transform", [LogitTransform(), LogitTransform(0.25), LogitTransform(3.0, softcap=2.0)])
@pytest.mark.parametrize("entropy_weight", [0.0, 0.7])
def test_values_and_gradients_equal_full_logits(chunk: int, transform: LogitTransform, entropy_weight: float) -> None:
    config = HeadConfig(0.6, chunk, torch.float32, transform)
    expected = run(config, entropy_weight, full=True)
    for found, want in zip(run(config, entropy_weight, full=False), expected, strict=True):
        torch.testing.assert_close(found, want, rtol=1e-5, atol=2e-6)


def test_temperature_belongs_in_the_log_probability() -> None:
    """ALG20: logits [2, 0] at temperature 0.5, token 0."""
    head = nn.Linear(1, 2, bias=False)
    head.weight = nn.Parameter(torch.tensor([[2.0], [0.0]]))
    config = HeadConfig(0.5, 8, torch.float32, LogitTransform())
    logprobs, _ = token_logprobs(torch.ones(1, 1), head, torch.tensor([0]), config)
    assert float(logprobs.detach()) == pytest.approx(-0.018150, abs=1e-6)


def test_memory_grows_with_the_chunk_and_not_with_tokens_times_vocabulary() -> None:
    """PRF01: forward and backward, 2,048 tokens x 50,000 words, chunks of 128 rows."""
    tokens, vocab, chunk = 2048, 50_000, 128
    head, hidden = nn.Linear(4, vocab, bias=False), torch.randn(tokens, 4, requires_grad=True)
    saved: list[int] = []
    made: list[int] = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            out = func(*args, **(kwargs or {}))
            made.extend(t.numel() for t in torch.utils._pytree.tree_leaves(out) if isinstance(t, torch.Tensor))
            return out

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor.numel())
        return tensor

    config = HeadConfig(1.0, chunk, torch.float32, LogitTransform())
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t), Watch():
        logprobs, _ = token_logprobs(hidden, head, torch.randint(vocab, (tokens,)), config)
        logprobs.sum().backward()
    assert max(saved) == max(made) == chunk * vocab
    assert sum(saved) < 2 * chunk * vocab, "one chunk is kept for the backward pass, not all of them"
    assert hidden.grad is not None and float(hidden.grad.abs().sum()) > 0


@pytest.mark.parametrize("chunk", [1, 4, 64])
@pytest.mark.parametrize("transform", [LogitTransform(), LogitTransform(3.0, softcap=2.0)])
@pytest.mark.parametrize("direction", ["reverse", "forward"])
def test_the_kl_of_whole_distributions_equals_full_logits(
    chunk: int, transform: LogitTransform, direction: str
) -> None:
    config = HeadConfig(0.6, chunk, torch.float32, transform)
    torch.manual_seed(4)
    hidden, ref_hidden = torch.randn(ROWS, HIDDEN), torch.randn(ROWS, HIDDEN)
    head, ref_head, weight = nn.Linear(HIDDEN, VOCAB), nn.Linear(HIDDEN, VOCAB), torch.randn(ROWS)

    def logits(h: torch.Tensor, linear: nn.Linear) -> torch.Tensor:
        z = linear(h) * transform.scale
        z = z if transform.softcap is None else transform.softcap * torch.tanh(z / transform.softcap)
        return z / config.temperature

    results = []
    for chunked in (True, False):
        own, linear = hidden.clone().requires_grad_(), copy.deepcopy(head)
        if chunked:
            kl = distribution_kl(own, linear, ref_hidden, ref_head, config, direction=direction)
        else:
            kl = full_kl(logits(own, linear), logits(ref_hidden, ref_head), direction)
        (kl * weight).sum().backward()
        results.append([kl.detach(), own.grad, linear.weight.grad, linear.bias.grad])
    assert ref_head.weight.grad is not None, "the plain way reaches the reference"
    for found, want in zip(*results, strict=True):
        torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-5)


def test_the_kl_of_whole_distributions_holds_one_chunk_of_logits() -> None:
    tokens, vocab, chunk = 512, 20_000, 64
    made: list[int] = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            out = func(*args, **(kwargs or {}))
            made.extend(t.numel() for t in torch.utils._pytree.tree_leaves(out) if isinstance(t, torch.Tensor))
            return out

    head, ref_head = nn.Linear(4, vocab, bias=False), nn.Linear(4, vocab, bias=False)
    hidden = torch.randn(tokens, 4, requires_grad=True)
    config = HeadConfig(1.0, chunk, torch.float32, LogitTransform())
    with Watch():
        kl = distribution_kl(hidden, head, torch.randn(tokens, 4), ref_head, config, direction="reverse")
        kl.sum().backward()
    assert max(made) == chunk * vocab
