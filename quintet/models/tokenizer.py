"""Text to ids and back, with everything a sampler must know about where an answer ends."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from quintet.models.config import ModelConfig
from quintet.types import QuintetError

_SENTINEL = "quintet-answer"


class Tokenizer:
    """A transformers tokenizer plus the end ids of the model it belongs to.

    `stop_ids` are the model's own (config, generation config). The tokenizer's `eos_token_id` is read
    live, so that changing `hf.eos_token` reaches the sampler. `reject_unknown`: a character that only
    the unknown token could stand for is an error (the built-in character tokenizer).
    """

    def __init__(
        self,
        hf: PreTrainedTokenizerBase,
        stop_ids: Iterable[int] = (),
        *,
        name: str = "",
        reject_unknown: bool = False,
        uses_chat_template: bool = True,
    ) -> None:
        self.hf = hf
        self.name = name or hf.name_or_path
        self.reject_unknown = reject_unknown
        self._stop_ids = tuple(stop_ids)
        self._end_of_turn = self._find_end_of_turn() if uses_chat_template and self.has_chat_template else None
        if not self.eos_ids:
            raise QuintetError(
                f"The tokenizer of {self.name!r} has no EOS token, nor does the model's config: no answer could end.\n"
                "Set eos_token in its tokenizer_config.json."
            )

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Every id that ends an answer. The first is the one to write when ending one: the chat template's
        end of turn where there is one, else the tokenizer's EOS."""
        ids = (self._end_of_turn, self.hf.eos_token_id, *self._stop_ids)
        return tuple(dict.fromkeys(i for i in ids if i is not None))

    @property
    def pad_id(self) -> int:
        """The padding id; the first end id where the tokenizer has none (nothing is added to the vocabulary)."""
        return self.eos_ids[0] if self.hf.pad_token_id is None else self.hf.pad_token_id

    @property
    def bos_id(self) -> int | None:
        return self.hf.bos_token_id

    @property
    def vocab_size(self) -> int:
        """Ids the tokenizer can make; the model's embedding may have more rows."""
        return len(self.hf)

    @property
    def has_chat_template(self) -> bool:
        return bool(self.hf.chat_template)

    def encode(self, text: str) -> list[int]:
        """Ids of `text` as it stands: nothing added in front or behind.

        Raises QuintetError for a character outside the alphabet of the built-in character tokenizer.
        """
        ids = list(self.hf.encode(text, add_special_tokens=False))
        if self.reject_unknown and self.hf.unk_token_id in ids:
            self._refuse_unknown(text)
        return ids

    def encode_plain(self, text: str) -> list[int]:
        """A prompt without a chat template: as `encode`, after one BOS where the tokenizer puts one by itself."""
        return self._one_bos(self.encode(text))

    def encode_chat(self, messages: Sequence[dict[str, Any]], **kwargs: Any) -> list[int]:
        """Ids of a conversation through the chat template, ready for the assistant's turn, with exactly one BOS.

        A conversation that ends with an assistant message is continued instead. `kwargs` go to the template.
        Raises QuintetError when there is no template or it cannot render these messages.
        """
        continues = bool(messages) and messages[-1].get("role") == "assistant"
        text = self._render(messages, add_generation_prompt=not continues, continue_final_message=continues, **kwargs)
        return self._one_bos(self.encode(text))

    def encode_after(self, messages: Sequence[dict[str, Any]], answer: int, *, ended: bool, **kwargs: Any) -> list[int]:
        """Ids between the sampled tokens of the assistant's message `messages[answer]` and its next turn: the
        template's end of that turn, the messages after it, the head of the next one.

        The answer is never encoded: a marker stands in for it, and what the template writes behind the marker is what
        counts. `ended`: the sampled tokens end with an end id, which then takes the place of the template's own.
        Raises QuintetError when the template does not show the marker exactly once.
        """
        marker = {"role": "assistant", "content": _SENTINEL}
        continues = answer + 1 < len(messages) and messages[-1].get("role") == "assistant"
        text = self._render(
            [*messages[:answer], marker, *messages[answer + 1 :]],
            add_generation_prompt=not continues,
            continue_final_message=continues,
            **kwargs,
        )
        if text.count(_SENTINEL) != 1:
            raise QuintetError(
                f"The chat template of {self.name!r} does not show an assistant's message exactly once: a conversation "
                "cannot be continued from its sampled tokens."
            )
        ids = self.encode(text.partition(_SENTINEL)[2])
        end = next((i for i, token in enumerate(ids) if token in self.eos_ids), None)
        if ended and end is not None and not self.decode(ids[:end]).strip():
            return ids[end + 1 :]
        return ids

    def encode_conversation(self, messages: Sequence[dict[str, Any]]) -> list[int]:
        """Ids of a whole conversation as the chat template closes it, with exactly one BOS. Raises as `encode_chat`."""
        return self._one_bos(self.encode(self._render(messages)))

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids`, special tokens left out, no spaces tidied."""
        return str(self.hf.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def decode_all(self, ids: Sequence[int]) -> str:
        """As `decode`, special tokens written out."""
        return str(self.hf.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def save(self, path: str) -> None:
        self.hf.save_pretrained(path)

    def _one_bos(self, ids: list[int]) -> list[int]:
        bos = self.bos_id
        if bos is None:
            return ids
        found = next((i for i, token in enumerate(ids) if token != bos), len(ids))
        adds_bos = self.hf.encode("")[:1] == [bos]
        return ([bos] if found or adds_bos else []) + ids[found:]

    def _render(self, messages: Sequence[dict[str, Any]], **kwargs: Any) -> str:
        from jinja2.exceptions import TemplateError

        if not self.has_chat_template:
            raise QuintetError(
                f"The data has chat messages, but the tokenizer of {self.name!r} has no chat template.\n"
                "Use an instruct model, or make plain text of the row with data.prompt_template."
            )
        try:
            return str(self.hf.apply_chat_template(list(messages), tokenize=False, **kwargs))
        except (TemplateError, TypeError, ValueError) as error:
            raise QuintetError(
                f"The chat template of {self.name!r} cannot render these messages: {error}.\n"
                f"They were: {str(list(messages))[:200]}\nCheck their roles and model.chat_template_kwargs."
            ) from error

    def _find_end_of_turn(self) -> int | None:
        """The special token that the chat template writes right after an assistant's words."""
        exchange = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _SENTINEL}]
        text = self._render(exchange)
        after = self.hf.encode(text.rpartition(_SENTINEL)[2].lstrip(), add_special_tokens=False)[:1]
        special = {i for i, token in self.hf.added_tokens_decoder.items() if token.special} | set(
            self.hf.all_special_ids
        )
        return after[0] if after and after[0] in special else None

    def _refuse_unknown(self, text: str) -> None:
        unknown = sorted(c for c in set(text) if self.hf.convert_tokens_to_ids(c) == self.hf.unk_token_id)
        raise QuintetError(
            f"The character tokenizer has no token for {' '.join(map(repr, unknown))} (in {text[:60]!r}).\n"
            f"Add them to model.tiny.alphabet, now {''.join(self._alphabet())!r}."
        )

    def _alphabet(self) -> list[str]:
        return [token for token in self.hf.get_vocab() if len(token) == 1]


class PromptEncoder:
    """Turns a prompt of the data, text or messages, into what the engine is fed, as `ModelConfig` says.

    With a chat template a plain text becomes the user's message and `system_prompt` goes before
    messages that have no system message of their own. Raises QuintetError when an option of the chat
    template is set and no template is used, or one is asked for and there is none.
    """

    def __init__(self, tokenizer: Tokenizer, config: ModelConfig) -> None:
        self._tokenizer = tokenizer
        self._config = config
        wanted = config.use_chat_template
        self.uses_chat_template = tokenizer.has_chat_template if wanted is None else wanted
        if self.uses_chat_template and not tokenizer.has_chat_template:
            raise QuintetError(
                f"model.use_chat_template is true, but the tokenizer of {tokenizer.name!r} has no chat template.\n"
                "Set it to false, or use an instruct model."
            )
        idle = [name for name in ("system_prompt", "chat_template_kwargs") if getattr(config, name)]
        if idle and not self.uses_chat_template:
            raise QuintetError(
                f"model.{idle[0]} has no effect: no chat template is used with {tokenizer.name!r}.\n"
                "Remove it, or set model.use_chat_template to true with a model that has one."
            )

    def __call__(self, messages: list[dict[str, Any]] | None, text: str | None) -> list[int]:
        """Ids of `messages`, or of `text` when there are no messages."""
        if not self.uses_chat_template:
            return self._tokenizer.encode_plain(self._plain(messages, text))
        return self.encode(self.conversation(messages, text))

    def conversation(self, messages: list[dict[str, Any]] | None, text: str | None) -> list[dict[str, Any]]:
        """The chat messages of a prompt, the system prompt included. Only with a chat template."""
        chat = messages if messages is not None else [{"role": "user", "content": text}]
        if self._config.system_prompt and chat[0].get("role") != "system":
            return [{"role": "system", "content": self._config.system_prompt}, *chat]
        return list(chat)

    def encode(self, chat: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None) -> list[int]:
        """Ids of a conversation, ready for the assistant; `tools` in OpenAI's form for templates that show them."""
        offered = {"tools": tools} if tools else {}
        return self._tokenizer.encode_chat(chat, **offered, **self._config.chat_template_kwargs)

    def encode_after(
        self, chat: list[dict[str, Any]], answer: int, *, ended: bool, tools: list[dict[str, Any]] | None = None
    ) -> list[int]:
        """As `Tokenizer.encode_after`, with the recipe's template options."""
        offered = {"tools": tools} if tools else {}
        return self._tokenizer.encode_after(chat, answer, ended=ended, **offered, **self._config.chat_template_kwargs)

    def _plain(self, messages: list[dict[str, Any]] | None, text: str | None) -> str:
        if messages is None and text is not None:
            return text
        raise QuintetError(
            f"The data has chat messages, but no chat template is used with {self._tokenizer.name!r}.\n"
            "Set model.use_chat_template to true with an instruct model, or make plain text with data.prompt_template."
        )
