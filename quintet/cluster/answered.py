"""The rows of an offline run: from the recipe's data to ids, both sides."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from quintet.algorithms.offline import OfflineAlgorithm
from quintet.cluster.build import Base
from quintet.config import RunConfig
from quintet.data.answers import Answered, AnswerEncoder, Form, answer_key, build_answered, find_form
from quintet.data.dataset import describe_skipped, load_rows
from quintet.models.tokenizer import PromptEncoder


def load_answered(
    config: RunConfig, algorithm: OfflineAlgorithm, base: Base, say: Callable[[str], None]
) -> tuple[list[Answered], list[Answered]]:
    """(training rows, held-out rows); `say` hears of rows left out. Raises QuintetError, see `data/answers.py`."""
    wanted = [Form.PAIR] if algorithm.needs_pairs else [Form.LABEL, Form.PAIR]
    if algorithm.objective.name == "likelihood":
        wanted = [Form.SUPERVISED, Form.PAIR]
    tokenizer = base.tokenizer
    encoder = AnswerEncoder(
        prompt=PromptEncoder(tokenizer, config.model),
        answer=lambda text: [*tokenizer.encode(text), tokenizer.eos_ids[0]],
        max_response_tokens=config.offline.max_response_tokens,
        context_tokens=base.hf_config.get_text_config().max_position_embeddings,
        every_turn=config.offline.train_on == "all",
    )
    form = Form.PAIR
    sides: list[list[Answered]] = []

    def key_of(rows: Any, data: Any) -> Any:
        nonlocal form
        form = find_form(rows, data, wanted)
        return answer_key(form)(rows, data)

    for rows in load_rows(config.data, config.seed, key_of=key_of):
        answered, skipped = build_answered(rows, config.data, form, encoder)
        for note in describe_skipped(skipped):
            say(note)
        sides.append(answered)
    return sides[0], sides[1][: config.eval.max_prompts]
