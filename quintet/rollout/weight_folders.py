"""Hugging Face folders through which weights reach an engine in another process."""

from __future__ import annotations

import copy
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

import tokenizers
from safetensors.torch import save_file
from tokenizers.models import WordLevel
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedTokenizerFast

from quintet.types import QuintetError

WEIGHTS_NAME = "model.safetensors"
_HEAD = "lm_head.weight"


class WeightFolders:
    """One folder per version below `given`, or in memory (/dev/shm) where that exists; the newest two stay.

    `untie`: a head that is the embedding's own tensor is written as one of its own, for an engine that would not renew
    such a head with the embedding. Raises QuintetError for a model whose embedding has another name than most.
    """

    def __init__(self, hf_config: PretrainedConfig, given: str | None, *, untie: bool = False) -> None:
        root = Path(given) if given else Path("/dev/shm")
        self._root = Path(tempfile.mkdtemp(prefix="quintet-weights-", dir=root if root.is_dir() else None))
        self._untie = untie and bool(hf_config.get_text_config().tie_word_embeddings)
        self._hf_config = _with_own_head(hf_config) if self._untie else hf_config
        self._written: list[Path] = []

    def write(self, weights: Mapping[str, Tensor], version: int) -> Path:
        """The newest two are the one being served and the one being loaded."""
        folder = self._root / f"v-{version:08d}"
        beside = folder.with_suffix(".partial")
        shutil.rmtree(beside, ignore_errors=True)  # of an attempt that was interrupted
        beside.mkdir()
        self._hf_config.save_pretrained(beside)
        _numbers_as_words(self._hf_config.get_text_config().vocab_size).save_pretrained(beside)
        tensors = {name: t.detach().cpu().contiguous() for name, t in _once(weights).items()}
        if self._untie:
            tensors[_HEAD] = _embedding(tensors).clone()
        save_file(tensors, beside / WEIGHTS_NAME, metadata={"format": "pt"})
        if folder.exists():  # the same version again, after a redone step
            shutil.rmtree(folder)
        beside.rename(folder)
        self._written = [*(f for f in self._written if f != folder), folder]
        for old in self._written[:-2]:
            shutil.rmtree(old)
        self._written = self._written[-2:]
        return folder

    def remove(self) -> None:
        shutil.rmtree(self._root)


def _numbers_as_words(vocab_size: int) -> PreTrainedTokenizerFast:
    """A tokenizer for a server that never sees text: its routes refuse to work without one."""
    words = {str(i): i for i in range(vocab_size)}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizers.Tokenizer(WordLevel(words, unk_token="0")))


def _with_own_head(hf_config: PretrainedConfig) -> PretrainedConfig:
    own = copy.deepcopy(hf_config)
    own.tie_word_embeddings = False
    own.get_text_config().tie_word_embeddings = False
    return own


def _embedding(weights: Mapping[str, Tensor]) -> Tensor:
    names = [name for name in weights if name.endswith("embed_tokens.weight")]
    if len(names) != 1:
        raise QuintetError(
            "The head of this model is its embedding, which this engine would not renew: use another rollout.engine."
        )
    return weights[names[0]]


def _once(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Each storage once (safetensors refuses two names for one); engines make a tied head from the embedding."""
    seen: set[int] = set()
    out: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        pointer = tensor.untyped_storage().data_ptr()
        if pointer not in seen:
            seen.add(pointer)
            out[name] = tensor
    return out
