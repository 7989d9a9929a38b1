"""Tokenizers and models for the serving tests: a small BPE with a chat template, a random model, a scripted one."""

from __future__ import annotations

import string
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import decoders
from tokenizers.models import BPE
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from quintet.models.tokenizer import Tokenizer
from quintet.rollout.config import RolloutConfig
from quintet.rollout.engine.worker import EmbeddedRolloutWorker
from quintet.rollout.server import RolloutServer
from quintet.serving import ThreadedServer

CPU = torch.device("cpu")
KEY = "the-key"
MODEL = "tiny-chat"
START, END = "<|im_start|>", "<|im_end|>"
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'
MERGES = [("u", "n"), ("d", "o"), ("un", "do"), ("a", "a"), ("aa", "aa"), ("1", "2"), ("12", "3"), ("e", "r")]
TEMPLATE = (
    "{% if tools %}{{ '<|im_start|>system\n' }}{{ tools | tojson }}{{ '<|im_end|>\n' }}{% endif %}"
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content }}"
    "{% for c in m.tool_calls or [] %}{{ '[' + c.function.name + ']' }}{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def chat_tokenizer(extra: Sequence[str] = ()) -> Tokenizer:
    """Characters, a few merges (so that sampled ids often differ from re-encoded text), ChatML marks."""
    characters = list(dict.fromkeys(string.printable + "é"))
    vocabulary = {token: i for i, token in enumerate([*characters, *(a + b for a, b in MERGES)])}
    raw = RawTokenizer(BPE(vocabulary, MERGES))
    raw.decoder = decoders.Fuse()
    hf = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token=END, clean_up_tokenization_spaces=False)
    hf.add_special_tokens({"additional_special_tokens": [START, END]})
    hf.add_tokens([CALL, *extra])
    hf.chat_template = TEMPLATE
    return Tokenizer(hf, name=MODEL)


def random_model(tokenizer: Tokenizer, *, context: int = 512, seed: int = 0) -> PreTrainedModel:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=tokenizer.vocab_size,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=context,
        initializer_range=0.2,
        eos_token_id=tokenizer.eos_ids[0],
        bos_token_id=None,
        pad_token_id=None,
    )
    return LlamaForCausalLM(config).float().eval()


@torch.no_grad()
def scripted_model(
    tokenizer: Tokenizer, script: dict[str, str], *, context: int = 512, noise: float = 0.0
) -> PreTrainedModel:
    """Says after each token of `script` its value, for certain: embeddings are one-hot, layers add nothing, and the
    head holds the successors. Everything else is followed by the end id.

    With `noise` the layers are random and the successors only likely (about every other time)."""
    size = tokenizer.vocab_size + tokenizer.vocab_size % 2
    config = LlamaConfig(
        vocab_size=size,
        hidden_size=size,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        max_position_embeddings=context,
        tie_word_embeddings=False,
        eos_token_id=tokenizer.eos_ids[0],
        bos_token_id=None,
        pad_token_id=None,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).float().eval()
    for name, parameter in model.named_parameters():
        if "norm" not in name:
            parameter.normal_(0.0, noise)
    model.model.embed_tokens.weight.copy_(torch.eye(size))
    successor = {tokenizer.encode(a)[0]: tokenizer.encode(b)[0] for a, b in script.items()}
    for token in range(size):
        model.lm_head.weight[successor.get(token, tokenizer.eos_ids[0]), token] = 0.5 if noise else 10.0
    return model


def make_worker(model: PreTrainedModel, tokenizer: Tokenizer, **options: object) -> EmbeddedRolloutWorker:
    return EmbeddedRolloutWorker(
        model.config,
        model.state_dict(),
        eos_ids=tokenizer.eos_ids,
        decode=tokenizer.decode,
        # the slower kernels: tests that interrupt an answer must meet it unfinished
        config=RolloutConfig(**({"kernels": "torch", "max_running": 64} | options)),
        device=CPU,
        dtype=torch.float32,
    )


def make_server(
    model: PreTrainedModel,
    tokenizer: Tokenizer,
    *,
    weights_root: Path | None = None,
    stream_limit: int | None = None,
    **options: object,
) -> RolloutServer:
    return RolloutServer(
        make_worker(model, tokenizer, **options),
        tokenizer,
        model=MODEL,
        key=KEY,
        context=model.config.max_position_embeddings,
        weights_root=weights_root,
        stream_limit=stream_limit,
    )


@contextmanager
def serving(server: RolloutServer) -> Iterator[str]:
    """The server's base URL while it runs."""
    service = ThreadedServer(server.app())
    service.start()
    try:
        yield service.url
    finally:
        service.close()
