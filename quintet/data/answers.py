"""Rows with given answers to token ids: preference pairs, labelled answers, supervised examples.

Forms, in the usual column names (`data.answers` renames them, `data.columns.prompt` and `data.prompt_template` are as
for prompts):

    pairs      prompt, chosen, rejected   strings or message lists (of a list the last message is the answer);
               chosen, rejected           without a prompt column: two conversations that differ in the last message
    labels     prompt, completion, label  label true: desirable (kto; pairs are taken as well)
    supervised messages                   the last message is the answer; only it is trained, or with
                                          `offline.train_on: all` every assistant message, in one sequence
               prompt, completion         or, without that column, data.columns.answer
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from quintet.data.config import DataConfig
from quintet.data.prompts import Encode, Messages, Skipped, SkipReason, raw_prompt
from quintet.data.rows import Row, require_columns
from quintet.types import QuintetError


class Form(StrEnum):
    """What a row is."""

    PAIR = "pair"
    LABEL = "label"
    SUPERVISED = "supervised"


@dataclass(frozen=True)
class Answered:
    """A prompt with the answer to learn from, and in a pair the one that lost; ids, the end id included."""

    prompt_ids: Sequence[int]
    response_ids: Sequence[int]
    rejected_ids: Sequence[int] | None = None
    desirable: bool = True  # False: an unpaired answer that is not wanted
    margin: float = 0.0  # how much better the chosen answer is, where the data says so
    loss_mask: Sequence[int] | None = None  # of response_ids, where not all of it is trained

    @property
    def trained(self) -> Sequence[int]:
        """1 for every id of the response that is trained, else 0."""
        return [1] * len(self.response_ids) if self.loss_mask is None else self.loss_mask


@dataclass(frozen=True)
class AnswerEncoder:
    """How text becomes ids, and how long they may be."""

    prompt: Encode
    answer: Callable[[str], list[int]]  # the end id included
    max_response_tokens: int
    context_tokens: int  # prompt and answer together
    every_turn: bool = False  # train all assistant messages of a conversation, not the last one only


@dataclass(frozen=True)
class _Parts:
    """A row before tokenisation."""

    prompt: str | Messages
    answers: list[str]  # chosen and rejected, or the only one
    desirable: bool = True
    margin: float = 0.0


def find_form(rows: list[Row], config: DataConfig, wanted: Sequence[Form]) -> Form:
    """The first of `wanted` whose columns the data has. Raises QuintetError naming what is missing."""
    present = rows[0].values
    columns = config.answers
    needed = {
        Form.PAIR: {"data.answers.chosen": columns.chosen, "data.answers.rejected": columns.rejected},
        Form.LABEL: {"data.answers.completion": columns.completion, "data.answers.label": columns.label},
        Form.SUPERVISED: _supervised_columns(present, config),
    }
    for form in wanted:
        if all(column in present for column in needed[form].values()):
            require_columns(rows, needed[form], "Every row needs them.")
            return form
    require_columns(rows[:1], needed[wanted[0]], "Set these options to present columns.")
    raise AssertionError("a form without columns always fits")


def _supervised_columns(present: dict[str, Any], config: DataConfig) -> dict[str, str]:
    if config.answers.messages in present:
        return {"data.answers.messages": config.answers.messages}
    if config.answers.completion in present or config.columns.answer is None:
        return {"data.answers.completion": config.answers.completion}
    return {"data.columns.answer": config.columns.answer}


def answer_key(form: Form) -> Callable[[list[Row], DataConfig], Callable[[Row], str]]:
    """For `load_rows`: a function that gives rows of equal prompts the same key, so that none stands on both sides."""

    def key_of(_: list[Row], config: DataConfig) -> Callable[[Row], str]:
        return lambda row: json.dumps(_parts(row, config, form).prompt, ensure_ascii=False, sort_keys=True)

    return key_of


def build_answered(
    rows: list[Row], config: DataConfig, form: Form, encoder: AnswerEncoder
) -> tuple[list[Answered], list[Skipped]]:
    """Ids of every row, and the rows that were left out or cut, each with its reason.

    Raises QuintetError for a row that cannot be read, for an overlong prompt under `overlong: error`, and when no row
    is left of some.
    """
    kept: list[Answered] = []
    skipped: list[Skipped] = []
    every = [_parts(row, config, form) for row in rows]
    if encoder.every_turn and every and all(isinstance(parts.prompt, str) for parts in every):
        raise QuintetError("offline.train_on all has no effect: the data has no conversations (messages). Remove it")
    for row, parts in zip(rows, every, strict=True):
        made = _encode(row, parts, config, encoder)
        for item in made:
            (kept if isinstance(item, Answered) else skipped).append(item)  # type: ignore[arg-type]
    if rows and not kept:
        raise QuintetError(f"data: no usable row is left; the first: {skipped[0].where}: {skipped[0].detail}")
    return kept, skipped


def _encode(row: Row, parts: _Parts, config: DataConfig, encoder: AnswerEncoder) -> list[Answered | Skipped]:
    def skip(reason: SkipReason, detail: str) -> Skipped:
        return Skipped(row.where, row.number, reason, detail)

    if not parts.prompt:
        return [skip(SkipReason.EMPTY_PROMPT, "the prompt is empty")]
    if not all(text.strip() for text in parts.answers):
        return [skip(SkipReason.NO_ANSWER, "an answer is empty")]
    if len(parts.answers) == 2 and parts.answers[0] == parts.answers[1]:
        return [skip(SkipReason.UNUSABLE_ANSWER, "chosen and rejected answer are the same")]
    notes: list[Answered | Skipped] = []
    text = parts.prompt if isinstance(parts.prompt, str) else None
    prompt = encoder.prompt(None if text is not None else parts.prompt, text)  # type: ignore[arg-type]
    if len(prompt) > config.max_prompt_tokens:
        detail = f"the prompt has {len(prompt)} tokens, at most {config.max_prompt_tokens} fit (data.max_prompt_tokens)"
        if config.overlong == "error":
            raise QuintetError(f"{row.where}: {detail}.\nSet data.overlong to skip or truncate, or raise the limit.")
        if config.overlong == "skip":
            return [skip(SkipReason.OVERLONG, detail)]
        prompt = prompt[-config.max_prompt_tokens :]
        notes.append(skip(SkipReason.TRUNCATED, detail))
    answers = [encoder.answer(text) for text in parts.answers]
    mask = None
    if encoder.every_turn and isinstance(parts.prompt, list):
        turns = _every_turn([*parts.prompt, {"role": "assistant", "content": parts.answers[0]}], encoder)
        if turns is None:
            detail = "the chat template writes earlier turns differently once later ones follow: train_on last is left"
            return [skip(SkipReason.UNUSABLE_ANSWER, detail)]
        prompt, answers[0], mask = turns
    longest = max(map(len, answers))
    if longest > encoder.max_response_tokens or len(prompt) + longest > encoder.context_tokens:
        detail = (
            f"prompt and answer have {len(prompt)} + {longest} tokens; at most {encoder.max_response_tokens} of an "
            f"answer (offline.max_response_tokens) and {encoder.context_tokens} in all fit"
        )
        return [skip(SkipReason.OVERLONG, detail)]
    rejected = answers[1] if len(answers) == 2 else None
    return [*notes, Answered(prompt, answers[0], rejected, parts.desirable, parts.margin, mask)]


def _every_turn(messages: Messages, encoder: AnswerEncoder) -> tuple[list[int], list[int], list[int]] | None:
    """(prompt ids, everything after them, its loss mask): each assistant message, its end id included, is trained after
    the very ids that the model would be given there. None where a template's turns are no prefix of the next ones."""
    places = [i for i, m in enumerate(messages) if m["role"] == "assistant" and i > 0]
    prompt = ids = encoder.prompt(messages[: places[0]], None)
    mask: list[int] = []
    for i in places:
        context = encoder.prompt(messages[:i], None)
        if context[: len(ids)] != ids:
            return None
        answer = encoder.answer(str(messages[i]["content"]))
        mask += [0] * (len(context) - len(ids)) + [1] * len(answer)
        ids = [*context, *answer]
    return prompt, ids[len(prompt) :], mask


def _parts(row: Row, config: DataConfig, form: Form) -> _Parts:
    if form is Form.PAIR:
        return _pair(row, config)
    columns = config.answers
    if form is Form.LABEL:
        label = row.values[columns.label]
        if not isinstance(label, bool):
            raise QuintetError(f"{row.where}: the label in {columns.label!r} is {label!r}; it must be true or false")
        return _Parts(raw_prompt(row, config), [_answer_text(row, columns.completion)], desirable=label)
    if columns.messages in row.values:
        messages = _messages(row, columns.messages)
        return _Parts(messages[:-1], [str(messages[-1]["content"])])
    column = columns.completion if columns.completion in row.values else config.columns.answer
    assert column is not None, "find_form has looked for it"
    return _Parts(raw_prompt(row, config), [_answer_text(row, column)])


def _pair(row: Row, config: DataConfig) -> _Parts:
    columns = config.answers
    margin = 0.0 if columns.margin is None else _number(row, columns.margin)
    if config.prompt_template is not None or config.columns.prompt in row.values:
        answers = [_answer_text(row, columns.chosen), _answer_text(row, columns.rejected)]
        return _Parts(raw_prompt(row, config), answers, margin=margin)
    chosen, rejected = _messages(row, columns.chosen), _messages(row, columns.rejected)
    if chosen[:-1] != rejected[:-1]:
        raise QuintetError(
            f"{row.where}: there is no column {config.columns.prompt!r}, and the conversations in {columns.chosen!r} "
            f"and {columns.rejected!r} differ before their last message.\nMap data.columns.prompt to a column"
        )
    return _Parts(chosen[:-1], [str(chosen[-1]["content"]), str(rejected[-1]["content"])], margin=margin)


def _answer_text(row: Row, column: str) -> str:
    """A string as it is, a number as its digits, of messages the content of the last."""
    value = row.values.get(column)
    if isinstance(value, list):
        return str(_messages(row, column)[-1]["content"])
    return "" if value is None else str(value)


def _messages(row: Row, column: str) -> Messages:
    """A conversation that the assistant ends. Raises QuintetError for anything else."""
    value = row.values.get(column)
    if not isinstance(value, list) or not all(isinstance(m, dict) and "role" in m and "content" in m for m in value):
        raise QuintetError(
            f"{row.where}: the column {column!r} is no list of messages (role, content): {str(value)[:80]!r}.\n"
            "Give the data a prompt column (data.columns.prompt), or map data.answers to other columns."
        )
    if not value or value[-1]["role"] != "assistant":
        raise QuintetError(f"{row.where}: the conversation in {column!r} does not end with an assistant message")
    return [dict(m) for m in value]


def _number(row: Row, column: str) -> float:
    value = row.values.get(column)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise QuintetError(f"{row.where}: the margin in {column!r} is {value!r}; it must be a number")
    return float(value)


class BatchSampler:
    """Batches as a function of their number, so that a resumed run goes on where it was: rows epoch after epoch, each
    once per epoch, in an order keyed by (seed, epoch). A batch may wrap into the next epoch; with `epochs` the last
    one is cut and the stream ends."""

    def __init__(
        self, examples: Sequence[Answered], size: int, *, seed: int, shuffle: bool, epochs: int | None
    ) -> None:
        if not examples:
            raise QuintetError("data: there is no row to train on.")
        self._examples, self._size, self._seed, self._shuffle = examples, size, seed, shuffle
        self._end = None if epochs is None else epochs * len(examples)
        self._epoch = -1
        self._order: list[int] = []

    def batch(self, index: int) -> list[Answered]:
        """The `index`-th batch of the run, from 0; empty from the end of the data on."""
        first = index * self._size
        last = first + self._size if self._end is None else min(first + self._size, self._end)
        return [self._at(position) for position in range(first, last)]

    def _at(self, position: int) -> Answered:
        epoch, offset = divmod(position, len(self._examples))
        if epoch != self._epoch:
            self._epoch, self._order = epoch, list(range(len(self._examples)))
            if self._shuffle:
                random.Random(f"answers/{self._seed}/{epoch}").shuffle(self._order)
        return self._examples[self._order[offset]]
