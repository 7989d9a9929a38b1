"""What the reward service says over HTTP, as JSON: the same for our client and for anybody else's.

`POST /score` takes `ScoreRequest` and gives `ScoreResponse`, one list of scores per group, in order; `POST /references`
takes `ReferenceRequest` and gives `ReferenceResponse`. Only `samples[].text` must be there.
"""

from __future__ import annotations

from typing import Any

import msgspec

from quintet.types import FinishReason, Group, GroupId, Prompt, Rollout, Score


class WireSample(msgspec.Struct, omit_defaults=True):
    """`ids`: the response's token ids, which only rules about length and some functions look at."""

    text: str
    finish_reason: FinishReason = FinishReason.STOP
    ids: list[int] = []


class WirePrompt(msgspec.Struct, omit_defaults=True):
    """`text` or `messages`, and what the rewards compare with."""

    id: str = ""
    text: str | None = None
    messages: list[dict[str, Any]] | None = None
    answer: str | None = None
    task_type: str = "math"
    test_cases: list[dict[str, Any]] | None = None
    metadata: dict[str, Any] = {}

    @classmethod
    def of(cls, prompt: Prompt) -> WirePrompt:
        return cls(
            **{name: getattr(prompt, name) for name in cls.__struct_fields__},
        )

    def prompt(self) -> Prompt:
        return Prompt(token_ids=[], **msgspec.structs.asdict(self))


class WireGroup(msgspec.Struct, omit_defaults=True):
    """The samples of one prompt: TRL functions and normalisation within the group see them together."""

    samples: list[WireSample]
    prompt: WirePrompt = msgspec.field(default_factory=WirePrompt)

    @classmethod
    def of(cls, group: Group) -> WireGroup:
        samples = [WireSample(r.text, r.finish_reason, r.response_ids) for r in group.rollouts]
        return cls(samples, WirePrompt.of(group.prompt))

    def group(self, number: int) -> Group:
        prompt = self.prompt.prompt()
        group_id = GroupId(prompt.id, occurrence=number)
        rollouts = [
            Rollout(group_id, i, [], s.ids, s.text, [0.0] * len(s.ids), [1] * len(s.ids), [], s.finish_reason)
            for i, s in enumerate(self.samples)
        ]
        return Group(group_id, prompt, rollouts)


class ScoreRequest(msgspec.Struct):
    groups: list[WireGroup]


class ScoreResponse(msgspec.Struct):
    scores: list[list[Score]]


class ReferenceRequest(msgspec.Struct):
    prompts: list[WirePrompt]


class ReferenceResponse(msgspec.Struct):
    """(index, reason) of the prompts of which no sample could get a reward."""

    unusable: list[tuple[int, str]]
