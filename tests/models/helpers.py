"""A word tokenizer with a chat template whose text begins with BOS, as many instruct models have."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as RawTokenizer
from tokenizers import models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from quintet.models.config import ModelConfig, TinyConfig

SPECIAL = ("<unk>", "<s>", "</s>", "<|user|>", "<|assistant|>", "<|system|>", "<|eot|>")
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|{{ m['role'] }}|> {{ m['content'] }} <|eot|>{% endfor %}"
    "{% if shout is defined and shout %}LOUD {% endif %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SMALL = TinyConfig(hidden_size=16, intermediate_size=24, layers=2, heads=2, kv_heads=1, max_position=32)


def small_config(**options: Any) -> ModelConfig:
    return ModelConfig(**{"name": "builtin:tiny", "device": "cpu", "tiny": SMALL} | options)


def chat_tokenizer(*, adds_bos: bool = True, template: str | None = TEMPLATE) -> PreTrainedTokenizerFast:
    """Ids: 0 <unk>, 1 <s> (BOS), 2 </s> (EOS), 3 user, 4 assistant, 5 system, 6 <|eot|>, then words; no pad token."""
    words = [f"w{i}" for i in range(100)] + ["hello", "LOUD", "quintet-answer", "?"]
    vocabulary = {word: i for i, word in enumerate((*SPECIAL, *words))}
    raw = RawTokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if adds_bos:
        raw.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    hf = PreTrainedTokenizerFast(
        tokenizer_object=raw,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        additional_special_tokens=["<|user|>", "<|assistant|>", "<|system|>", "<|eot|>"],
    )
    hf.chat_template = template
    return hf


def edit_json(path: Path, **values: Any) -> None:
    content = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(content | values))


def load_cases() -> dict[str, Any]:
    lines = (Path(__file__).parents[1] / "data" / "cases_data.jsonl").read_text(encoding="utf-8").splitlines()
    return {case["id"]: case for case in map(json.loads, lines)}
