"""The built-in Llama-style model and its character tokenizer: real transformers classes, made from a config."""

from __future__ import annotations

from tokenizers import Regex, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as RawTokenizer
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from quintet.models.config import TinyConfig
from quintet.models.device import seeded

SPECIAL_TOKENS = ("<pad>", "<eos>", "<unk>")


def tiny_tokenizer(config: TinyConfig) -> PreTrainedTokenizerFast:
    """One token per character of `config.alphabet`, after the three special tokens; no BOS, no chat template."""
    vocabulary = {token: index for index, token in enumerate((*SPECIAL_TOKENS, *config.alphabet))}
    raw = RawTokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    raw.decoder = decoders.Fuse()  # join without spaces
    return PreTrainedTokenizerFast(
        tokenizer_object=raw,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        model_max_length=config.max_position,
        clean_up_tokenization_spaces=False,
    )


def tiny_hf_config(config: TinyConfig) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=len(SPECIAL_TOKENS) + len(config.alphabet),
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        num_key_value_heads=config.kv_heads,
        max_position_embeddings=config.max_position,
        tie_word_embeddings=config.tie_embeddings,
        pad_token_id=SPECIAL_TOKENS.index("<pad>"),
        eos_token_id=SPECIAL_TOKENS.index("<eos>"),
        bos_token_id=None,
    )


def tiny_model(config: TinyConfig, seed: int, attn_implementation: str | None = None) -> LlamaForCausalLM:
    """Freshly initialised float32 weights on the CPU: a function of `config` and `seed` alone."""
    hf_config = tiny_hf_config(config)
    hf_config._attn_implementation = attn_implementation
    with seeded(seed):
        model = LlamaForCausalLM(hf_config)
    model.float()
    return model
