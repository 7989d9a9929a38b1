"""From `data.*` of a recipe to rows, held-out rows and prompts.

The held-out rows are chosen by prompt, so that two rows with one prompt never stand on both sides.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from quintet.data import verifiers
from quintet.data.config import DataConfig
from quintet.data.prompts import Encode, Skipped, SkipReason, describe_skipped, make_prompts, prompt_key
from quintet.data.readers import FILE_SUFFIXES, read_dataset, read_file
from quintet.data.reasoning import reasoning_gym_rows
from quintet.data.rows import Row
from quintet.data.tasks import task_rows
from quintet.types import Prompt, QuintetError

__all__ = ["SkipReason", "Skipped", "build_prompts", "describe_skipped", "load_rows"]

_TASK, _REASONING_GYM = "task:", "reasoning_gym:"
_WITHOUT_SPLITS = (_TASK, _REASONING_GYM, verifiers.SOURCE)


def load_rows(
    config: DataConfig, seed: int, *, key_of: Callable[[list[Row], DataConfig], Callable[[Row], str]] = prompt_key
) -> tuple[list[Row], list[Row]]:
    """Training rows and held-out rows, in an order that depends on the data and `seed` alone.

    Held out is all of `eval_source`, or else `eval_size` rows of `source`; `limit` then cuts the training rows.
    `key_of` checks the columns of rows and gives rows of equal prompts the same key.
    Raises QuintetError for data that is missing, empty, broken or without a mapped column, for an
    `eval_size` that leaves nothing to train on, and for an option that this kind of source ignores.
    """
    _refuse_idle_options(config)
    rows = _read(config.source, config.split, config.args, seed)
    key = key_of(rows, config)
    if config.eval_source is not None:
        held_out = _read(config.eval_source, config.eval_split, config.args, seed)
        key_of(held_out, config)  # for its check of the columns
    else:
        rows, held_out = _hold_out(rows, config, key)
    return rows[: config.limit], held_out


def build_prompts(
    rows: list[Row],
    config: DataConfig,
    tokenizer_encode: Encode,
    *,
    prompt_limit: int | None = None,
    usable_answer: Callable[[str], bool] | None = None,
) -> tuple[list[Prompt], list[Skipped]]:
    """Prompts with ids and tokens, and the rows that were left out or cut, each with its reason and row number.

    `tokenizer_encode(messages, text)` makes the token ids (`models.tokenizer.PromptEncoder`).
    `prompt_limit` is what the model's context leaves for a prompt; the smaller of it and
    `max_prompt_tokens` counts. `usable_answer` says whether a reference answer can be graded at all
    (a grader that finds nothing to compare with in it would score every sample wrongly).

    A prompt's id is the `id` column, where two rows with one id are an error; else a hash of its content, and
    rows of equal content get `-2`, `-3` ... in order. Raises QuintetError for rows that cannot be
    read as prompts, for an overlong prompt under `overlong: error`, and when no row is left.
    """
    if not rows:
        return [], []
    limit = config.max_prompt_tokens if prompt_limit is None else min(config.max_prompt_tokens, prompt_limit)
    if limit < 1:
        raise QuintetError(f"data: the model's context leaves {limit} tokens for a prompt.\nLower rollout.max_tokens.")
    prompts, skipped = make_prompts(rows, config, tokenizer_encode, limit, usable_answer)
    if not prompts:
        raise QuintetError("data: no usable row is left. " + "\n".join(describe_skipped(skipped)[:2]))
    return prompts, skipped


def _read(source: str, split: str, args: dict[str, Any], seed: int) -> list[Row]:
    if source.startswith(_TASK):
        return task_rows(source.removeprefix(_TASK), args, seed)
    if source.startswith(_REASONING_GYM):
        return reasoning_gym_rows(source.removeprefix(_REASONING_GYM), args, seed)
    if source.startswith(verifiers.SOURCE):
        return verifiers.verifiers_rows(source.removeprefix(verifiers.SOURCE), args, split)
    if source.endswith(FILE_SUFFIXES):
        return read_file(source)
    return read_dataset(source, split, args)


def _has_splits(source: str | None) -> bool:
    return source is not None and not source.startswith(_WITHOUT_SPLITS) and not source.endswith(FILE_SUFFIXES)


def _refuse_idle_options(config: DataConfig) -> None:
    defaults = DataConfig()
    sources = [s for s in (config.source, config.eval_source) if s is not None]
    idle = {
        "args": bool(config.args) and all(s.endswith(FILE_SUFFIXES) for s in sources),
        "split": config.split != defaults.split and not _has_splits(config.source),
        "eval_split": config.eval_split != defaults.eval_split and not _has_splits(config.eval_source),
        "eval_size": config.eval_size != defaults.eval_size and config.eval_source is not None,
        "held_out_seed": config.held_out_seed != 0 and config.eval_source is not None,
    }
    for option in (name for name, is_idle in idle.items() if is_idle):
        with_eval = f" and eval_source {config.eval_source!r}" if config.eval_source else " and no eval_source"
        raise QuintetError(f"data.{option} has no effect with source {config.source!r}{with_eval}. Remove it.")


def _hold_out(rows: list[Row], config: DataConfig, key: Callable[[Row], str]) -> tuple[list[Row], list[Row]]:
    """Whole groups of equal prompts, in an order drawn from `held_out_seed`, until `eval_size` rows are held out. Which
    ones depends on the set of prompts alone, so that runs with different seeds are evaluated on the same prompts."""
    if config.eval_size == 0:
        return rows, []
    positions: dict[str, list[int]] = defaultdict(list)
    for position, row in enumerate(rows):
        positions[key(row)].append(position)
    keys = sorted(positions)
    random.Random(f"held-out/{config.held_out_seed}").shuffle(keys)
    chosen: set[int] = set()
    for group in (positions[k] for k in keys):
        if len(chosen) + len(group) <= config.eval_size:
            chosen.update(group)
    if len(chosen) == len(rows) or not chosen:
        raise QuintetError(
            f"data.eval_size: {config.eval_size} held-out rows cannot be split from the {len(rows)} rows "
            f"({len(keys)} different prompts) of {config.source!r}.\nChange eval_size, or name an eval_source."
        )
    train = [row for position, row in enumerate(rows) if position not in chosen]
    return train, [rows[position] for position in sorted(chosen)]
