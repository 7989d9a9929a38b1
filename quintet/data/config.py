"""Where prompts come from and how their columns are read."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class ColumnsConfig(BaseModel):
    """Column of the data set -> field of `Prompt`. Columns not named here travel in `Prompt.metadata`."""

    model_config = ConfigDict(extra="forbid")

    prompt: str = Field("prompt", description="a string, or a list of chat messages")
    answer: str | None = Field("answer", description="reference answer; null: the data has none")
    test_cases: str | None = None
    task_type: str | None = None
    id: str | None = Field(None, description="stable id of a row; null: made from its content")


class AnswerColumnsConfig(BaseModel):
    """Columns of given answers, for offline presets (dpo, kto, reward_model, sft ...); each reads those it needs."""

    model_config = ConfigDict(extra="forbid")

    chosen: str = "chosen"
    rejected: str = "rejected"
    margin: str | None = Field(None, description="reward_model: how much better the chosen answer is; null: 0")
    completion: str = "completion"
    label: str = Field("label", description="kto: true for a desirable completion")
    messages: str = Field("messages", description="sft: a conversation whose last message is trained")


class DataConfig(BaseModel):
    """`source`: `task:sums` (or another task, or `task:module:function`), `reasoning_gym:NAME`, `verifiers:ENV_ID`, a
    `.jsonl`, `.json` or `.parquet` file, or a Hugging Face data set id or folder."""

    model_config = ConfigDict(extra="forbid")

    source: str = "task:sums"
    args: dict[str, Any] = Field(default_factory=dict, description="arguments of the task or of datasets.load_dataset")
    split: str = "train"
    eval_source: str | None = Field(None, description="held-out data; null: `eval_size` rows are held out of `source`")
    eval_split: str = "test"
    eval_size: int = Field(100, ge=0, description="rows held out when there is no eval_source (0: none)")
    held_out_seed: int = Field(
        0, ge=0, description="which rows are held out; not the run's seed, so that all seeds are evaluated on the same"
    )
    limit: int | None = Field(None, gt=0, description="use only the first N training rows")
    columns: ColumnsConfig = Field(default_factory=ColumnsConfig)
    answers: AnswerColumnsConfig = Field(default_factory=AnswerColumnsConfig)
    prompt_template: str | None = Field(
        None, description="str.format over the row's columns, e.g. 'Question: {question}'"
    )
    max_prompt_tokens: int = Field(1024, gt=0)
    overlong: Literal["error", "skip", "truncate"] = Field(
        "skip", description="a prompt over max_prompt_tokens; truncate keeps its end"
    )
    shuffle: bool = Field(
        True, description="a new order of the prompts in every epoch; false: always the order of the data"
    )
    epochs: int | None = Field(
        None, gt=0, description="end the run after this many passes over the prompts; null: as many as `steps` takes"
    )
