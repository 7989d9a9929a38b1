"""A reward model behind HTTP: `fn: remote_model, args: {urls: [...], model: NAME, api: classify}`.

Speaks to vLLM's pooling server (since 0.14; an older one ignores `use_activation` and answers probabilities) by one of
three routes:

- `classify`: `POST /classify`, a sequence classifier; the value is `data[i].probs[label]`
- `pooling`: `POST /pooling`, any pooler; `data[i].data[label]`, of the last token where it gives one row per token
- `score`: `POST /score`, a cross-encoder on (prompt, response); `data[i].score`

`activation` false asks for the head's own numbers instead of a softmax or sigmoid (`use_activation`). Responses to text
prompts are collected for `window_ms` and sent together. A conversation goes as `messages`, one per request, because
the server applies its own chat template and takes only one at a time; its batching is then the server's. Left out:
a template applied here (the server's is the model's own).
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import Field

from quintet.reward.errors import FunctionFailed
from quintet.reward.http import Batcher, HttpOptions, JsonClient
from quintet.reward.options import parse_options
from quintet.reward.sample import Sample, Verdict
from quintet.types import FailureKind, Prompt


class RemoteModelOptions(HttpOptions):
    model: str = Field(min_length=1, description="the name that the server knows the model by")
    api: Literal["classify", "pooling", "score"] = "classify"
    label: int = Field(0, ge=0, description="which of the model's outputs is the reward")
    activation: bool = Field(False, description="the server's softmax or sigmoid on top of the head")
    suffix: str = Field("", description="put after a whole response to a text prompt, e.g. the model's end token")
    window_ms: float = Field(5.0, ge=0, description="how long text samples are collected for one request")
    max_batch: int = Field(32, ge=1, description="text samples in one request")


class RemoteModel:
    """An `AsyncGrader`. Raises QuintetError for a wrong option when made."""

    def __init__(self, name: str, args: Mapping[str, Any], timeout_s: float) -> None:
        self._options = options = parse_options(RemoteModelOptions, name, args)
        self._client = JsonClient(name, options)
        self._texts: Batcher[Sample, float] = Batcher(self._send_texts, options.window_ms / 1000, options.max_batch)

    def reference_fault(self, prompt: Prompt) -> str | None:
        return None  # it needs no reference

    async def start(self) -> None:
        await self._client.start()

    async def close(self) -> None:
        await self._client.close()

    async def grade(self, sample: Sample) -> Verdict:
        """Raises FunctionFailed of kind transport or timeout."""
        if sample.messages is None or self._options.api == "score":
            return Verdict(await self._texts.submit(sample))
        answer = {"role": "assistant", "content": sample.text}
        [value] = await self._ask({"messages": [*sample.messages, answer]}, 1)
        return Verdict(value)

    async def _send_texts(self, samples: Sequence[Sample]) -> Sequence[float | FunctionFailed]:
        """When the server refuses a batch, once more one by one: a sample that is too long costs no other."""
        try:
            return await self._ask(self._inputs(samples), len(samples))
        except FunctionFailed as error:
            if error.retryable or len(samples) == 1:
                return [error] * len(samples)
        alone = await asyncio.gather(*(self._send_texts([sample]) for sample in samples))
        return [result for [result] in alone]

    def _inputs(self, samples: Sequence[Sample]) -> dict[str, Any]:
        responses = [s.text + ("" if s.truncated else self._options.suffix) for s in samples]
        prompts = [_prompt_text(s) for s in samples]
        if self._options.api == "score":
            return {"queries": prompts, "documents": responses}
        return {"input": [prompt + response for prompt, response in zip(prompts, responses, strict=True)]}

    async def _ask(self, inputs: Mapping[str, Any], count: int) -> list[float]:
        options = self._options
        body = {"model": options.model, "use_activation": options.activation, **inputs}
        answer = await self._client.post(f"/{options.api}", body)
        try:
            rows = sorted(answer["data"], key=lambda row: row["index"])
            values = [_value(row, options) for row in rows]
        except (KeyError, IndexError, TypeError, ValueError) as error:
            fault = f"{type(error).__name__}: {error}"
            raise FunctionFailed(f"/{options.api} answered in another form ({fault})", FailureKind.TRANSPORT) from error
        if len(values) != count:
            raise FunctionFailed(
                f"/{options.api} answered {len(values)} values for {count} samples", FailureKind.TRANSPORT
            )
        return values


def _value(row: Mapping[str, Any], options: RemoteModelOptions) -> float:
    match options.api:
        case "score":
            value = row["score"]
        case "classify":
            value = row["probs"][options.label]
        case "pooling":
            data = row["data"]
            value = (data[-1] if isinstance(data[0], list) else data)[options.label]
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"the value {number}")
    return number


def _prompt_text(sample: Sample) -> str:
    if sample.messages is None:
        return sample.prompt_text
    return "\n\n".join(f"{m['role']}: {m['content']}" for m in sample.messages)
