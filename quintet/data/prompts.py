"""Rows to prompts: columns, template, id, token ids, and the reasons to leave a row out."""

from __future__ import annotations

import hashlib
import json
import string
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import msgspec

from quintet.data.config import DataConfig
from quintet.data.rows import Row, require_columns
from quintet.types import Prompt, QuintetError

Messages = list[dict[str, Any]]
Encode = Callable[[Messages | None, str | None], list[int]]
_ID_HEX_DIGITS = 16


class SkipReason(StrEnum):
    OVERLONG = "overlong"
    TRUNCATED = "truncated"  # kept, but cut
    EMPTY_PROMPT = "empty_prompt"
    NO_ANSWER = "no_answer"
    UNUSABLE_ANSWER = "unusable_answer"


@dataclass(frozen=True)
class Skipped:
    """A row that did not become a prompt, or (`truncated`) only a part of it.

    `where` names file and line, or source and row.
    """

    where: str
    number: int
    reason: SkipReason
    detail: str


def describe_skipped(skipped: Iterable[Skipped], named: int = 5) -> list[str]:
    """One line per reason: how many rows, the first `named` of them, and the detail of the first."""
    by_reason: dict[SkipReason, list[Skipped]] = {}
    for item in skipped:
        by_reason.setdefault(item.reason, []).append(item)
    lines = []
    for reason, items in by_reason.items():
        names = ", ".join(item.where for item in items[:named]) + (", ..." if len(items) > named else "")
        done = "cut" if reason is SkipReason.TRUNCATED else "skipped"
        lines.append(f"{len(items)} rows {done} ({reason}): {names}: {items[0].detail}")
    return lines


def prompt_key(rows: list[Row], config: DataConfig) -> Callable[[Row], str]:
    """A function that gives rows of equal prompts the same key. Raises QuintetError when a mapped column is missing."""
    _check_columns(rows, config)
    return lambda row: json.dumps(raw_prompt(row, config), ensure_ascii=False, sort_keys=True, default=str)


def make_prompts(
    rows: list[Row],
    config: DataConfig,
    encode: Encode,
    limit: int,
    usable_answer: Callable[[str], bool] | None,
) -> tuple[list[Prompt], list[Skipped]]:
    """See `dataset.build_prompts`."""
    _check_columns(rows, config)
    prompts: list[Prompt] = []
    skipped: list[Skipped] = []
    ids = _Ids()
    for row in rows:
        made = _make(row, config, usable_answer)
        if isinstance(made, Skipped):
            skipped.append(made)
            continue
        made.id = ids.take(row, made, config.columns.id)
        made.token_ids = encode(made.messages, made.text)
        note = _fit(row, made, limit, config.overlong)
        if note is not None:
            skipped.append(note)
        if note is None or note.reason is SkipReason.TRUNCATED:
            prompts.append(made)
    return prompts, skipped


def _make(row: Row, config: DataConfig, usable_answer: Callable[[str], bool] | None) -> Prompt | Skipped:
    raw = raw_prompt(row, config)
    if not raw or (isinstance(raw, str) and not raw.strip()):
        return Skipped(row.where, row.number, SkipReason.EMPTY_PROMPT, "the prompt is empty")
    columns = config.columns
    answer = _answer(row, columns.answer)
    if columns.answer is not None and answer is None:
        detail = f"the column {columns.answer!r} is empty (set data.columns.answer to null when no reward needs it)"
        return Skipped(row.where, row.number, SkipReason.NO_ANSWER, detail)
    if answer is not None and usable_answer is not None and not usable_answer(answer):
        detail = f"no reward can be computed from the answer {answer[:80]!r}"
        return Skipped(row.where, row.number, SkipReason.UNUSABLE_ANSWER, detail)
    prompt = Prompt(
        id="",
        token_ids=[],
        messages=None if isinstance(raw, str) else raw,
        text=raw if isinstance(raw, str) else None,
        answer=answer,
        test_cases=test_cases_of(row, columns.test_cases),
        metadata=_metadata(row, config),
    )
    if columns.task_type is not None:
        prompt.task_type = str(row.values[columns.task_type])
    return prompt


def _check_columns(rows: list[Row], config: DataConfig) -> None:
    columns = config.columns
    wanted = {f"data.columns.{name}": column for name, column in columns.model_dump().items() if column is not None}
    if config.prompt_template is not None:
        del wanted["data.columns.prompt"]
        fields = _template_fields(config.prompt_template)
        require_columns(rows, {f"data.prompt_template {{{f}}}": f for f in fields}, "Use the names of present columns.")
    mend = "Set these options to present columns; data.columns.answer may be null when the data has no answers."
    require_columns(rows, wanted, mend)


def _template_fields(template: str) -> list[str]:
    try:
        names = [name for _, name, _, _ in string.Formatter().parse(template) if name is not None]
    except ValueError as error:
        raise QuintetError(f"data.prompt_template: {error} in {template!r}.\nWrite a literal brace twice.") from error
    fields = [name.partition(".")[0].partition("[")[0] for name in names]
    if not fields or not all(fields):
        raise QuintetError(f"data.prompt_template: {template!r} must name columns, e.g. 'Question: {{question}}'.")
    return fields


def raw_prompt(row: Row, config: DataConfig) -> str | Messages:
    """The text or the messages of a row, before any chat template."""
    if config.prompt_template is not None:
        try:
            return config.prompt_template.format_map(row.values)
        except (KeyError, IndexError, AttributeError, ValueError, TypeError) as error:
            raise QuintetError(
                f"{row.where}: data.prompt_template cannot be filled from this row: {error!r}."
            ) from error
    raw = row.values[config.columns.prompt]
    if raw is None or isinstance(raw, str):
        return raw or ""
    if isinstance(raw, list) and all(
        isinstance(m, dict) and isinstance(m.get("role"), str) and "content" in m for m in raw
    ):
        return [dict(m) for m in raw]
    raise QuintetError(
        f"{row.where}: the prompt is no string and no list of messages (role, content): {str(raw)[:80]!r}.\n"
        "Map data.columns.prompt to another column, or use data.prompt_template."
    )


def _answer(row: Row, column: str | None) -> str | None:
    """The reference answer as text (numbers and lists as JSON), or None where it is empty."""
    value = None if column is None else row.values[column]
    if value is None or isinstance(value, str):
        return value if value and value.strip() else None
    return json.dumps(value, ensure_ascii=False, default=str)


def test_cases_of(row: Row, column: str | None) -> list[dict[str, Any]] | None:
    """A list of objects, or what stands for one in well-known data: JSON text of it, a single object (APPS, TACO), test
    code (HumanEval), a list of asserts (MBPP). `reward/code_tests/reading.py` says what the objects may be."""
    value = None if column is None else row.values[column]
    if isinstance(value, str):
        value = _decoded_tests(row, column, value)
    if isinstance(value, dict):
        return [value]
    if isinstance(value, list) and value and all(isinstance(case, str) for case in value):
        return [{"assert": case} for case in value]
    if value is None or (isinstance(value, list) and all(isinstance(case, dict) for case in value)):
        return value
    raise QuintetError(f"{row.where}: the test cases in {column!r} are no list of objects: {str(value)[:80]!r}.")


def _decoded_tests(row: Row, column: str | None, text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        if "assert" in text:
            return [text]
        raise QuintetError(
            f"{row.where}: the test cases in {column!r} are neither JSON ({error.msg}) nor asserts."
        ) from error


def _metadata(row: Row, config: DataConfig) -> dict[str, Any]:
    columns = config.columns
    used = {columns.answer, columns.test_cases, columns.task_type, columns.id}
    if config.prompt_template is None:
        used.add(columns.prompt)
    return {name: value for name, value in row.values.items() if name not in used}


def _fit(row: Row, prompt: Prompt, limit: int, overlong: str) -> Skipped | None:
    """Cut the prompt, or say why it is left out; None where it fits."""
    length = len(prompt.token_ids)
    if length <= limit:
        return None
    detail = f"{length} tokens, at most {limit} fit"
    if overlong == "skip":
        return Skipped(row.where, row.number, SkipReason.OVERLONG, detail)
    if overlong == "error":
        raise QuintetError(
            f"{row.where}: the prompt is too long: {detail}.\n"
            "The limit is data.max_prompt_tokens, or what the context leaves beside rollout.max_tokens.\n"
            "Set data.overlong to skip or truncate, or raise the limit."
        )
    prompt.token_ids = prompt.token_ids[-limit:]
    return Skipped(row.where, row.number, SkipReason.TRUNCATED, detail)


class _Ids:
    """Unique ids of the prompts of one list."""

    def __init__(self) -> None:
        self._owner: dict[str, Row] = {}
        self._copies: Counter[str] = Counter()

    def take(self, row: Row, prompt: Prompt, column: str | None) -> str:
        if column is None:
            return self._from_content(prompt)
        value = row.values[column]
        chosen = "" if value is None else str(value)
        if not chosen:
            raise QuintetError(
                f"{row.where}: the id column {column!r} is empty.\nFill it, or set data.columns.id to null."
            )
        if chosen in self._owner:
            raise QuintetError(
                f"{row.where}: the id {chosen!r} is also the id of {self._owner[chosen].where}.\n"
                "Make the ids unique, or set data.columns.id to null to make them from the content."
            )
        self._owner[chosen] = row
        return chosen

    def _from_content(self, prompt: Prompt) -> str:
        content = (prompt.text, prompt.messages, prompt.answer, prompt.test_cases)
        encoded = msgspec.json.encode(content, order="sorted")
        chosen = hashlib.sha256(encoded).hexdigest()[:_ID_HEX_DIGITS]
        self._copies[chosen] += 1
        copy = self._copies[chosen]
        return chosen if copy == 1 else f"{chosen}-{copy}"
