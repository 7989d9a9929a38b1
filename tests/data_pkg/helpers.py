"""A stand-in for the tokenizer: one id per character, messages joined."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from quintet.data.config import DataConfig
from quintet.types import Prompt


def encode(messages: list[dict[str, Any]] | None, text: str | None) -> list[int]:
    content = "".join(m["content"] for m in messages) if messages is not None else text
    assert content is not None
    return [ord(c) for c in content]


def write_jsonl(path: Path, records: list[dict[str, Any]]) -> str:
    path.write_text("\n".join(json.dumps(r, ensure_ascii=False) for r in records) + "\n", encoding="utf-8")
    return str(path)


def config(source: str, **options: Any) -> DataConfig:
    return DataConfig.model_validate({"source": source, "eval_size": 0} | options)


def prompts(n: int) -> list[Prompt]:
    return [Prompt(id=str(i), token_ids=[i]) for i in range(n)]


def load_cases() -> dict[str, Any]:
    lines = (Path(__file__).parents[1] / "data" / "cases_data.jsonl").read_text(encoding="utf-8").splitlines()
    return {case["id"]: case for case in map(json.loads, lines)}
