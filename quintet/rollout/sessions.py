"""What the gateway records of one agent's conversation: a tree of turns, and the token sequences in it.

A request's messages are matched against the recorded ones from the start. As far as they are the same, the recorded ids
are taken; only what comes after is encoded. A client that goes on with an older state, or that changed its history,
branches off at the last turn that is still the same: a new *segment*, which shares the tokens before it. A turn's
sampled tokens are trained in one segment only, the first that has them.

    root ── turn 1 ── turn 2 ── turn 3        segment 1: turns 1, 2, 3
                └──── turn 4                  segment 2: turn 4, the tokens of turn 1 are its prompt
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import msgspec

from quintet.models.tokenizer import Tokenizer
from quintet.rollout.openai_api import plain_message
from quintet.rollout.transcript import Transcript
from quintet.types import Episode, FinishReason, GroupId, QuintetError, Rollout, SamplingParams, expand_versions

Message = dict[str, Any]


class SessionState(StrEnum):
    OPEN = "open"
    FINISHED = "finished"  # its reward has come; no further call is served
    EXPIRED = "expired"  # nothing came for too long; `resume` opens it again


class TurnRecord(msgspec.Struct):
    """One answered call. `context_ids` were fed after the parent's tokens; `ids` were sampled."""

    number: int
    parent: int | None
    context: list[Message]  # the messages since the parent's answer, in plain form
    context_ids: list[int]
    message: Message  # the answer as the client was given it
    text: str
    ids: list[int]
    logprobs: list[float]
    versions: list[int]
    finish_reason: FinishReason
    tools: str = ""  # the tools that were offered, as canonical JSON
    temperature: float = 1.0


class Segment(msgspec.Struct):
    """A token sequence for training. `shared_prefix`: its first tokens that an earlier segment begins with too."""

    rollout: Rollout
    shared_prefix: int
    turns: list[int]


class SessionRecord(msgspec.Struct):
    """All of a session that is worth keeping: `export` gives it, `restore` takes it."""

    id: str
    group_id: GroupId
    sample_index: int
    turns: list[TurnRecord] = []
    reward: float | None = None
    state: SessionState = SessionState.OPEN
    next_position: int = 0


@dataclass(frozen=True)
class Match:
    """Where a request stands: after `turn` (None: at the start), with `messages[start:]` new, encoded as `new_ids`."""

    turn: TurnRecord | None
    start: int
    messages: list[Message]
    prefix_ids: list[int]
    new_ids: list[int]
    tools: str

    @property
    def prompt_ids(self) -> list[int]:
        return [*self.prefix_ids, *self.new_ids]


@dataclass
class Session:
    """One agent's conversation, and its key."""

    record: SessionRecord
    key: str = field(default_factory=lambda: f"sk-{secrets.token_urlsafe(24)}")
    used_at: float = 0.0  # clock seconds of the last sign of life
    open_calls: int = 0
    out_of_context: bool = False  # a call was refused because the conversation outgrew the model's context
    sampling: SamplingParams | None = (
        None  # set: temperature, truncation and limits are the run's, whatever is asked for
    )

    def match(self, tokenizer: Tokenizer, messages: Sequence[Message], tools: Any, **kwargs: Any) -> Match:
        """Splice the recorded ids in. `kwargs` go to the chat template. Raises QuintetError where that refuses."""
        plain = [plain_message(m) for m in messages]
        key = canonical_tools(tools)
        turn, start = self._deepest(None, [_canonical(m) for m in plain], 0, key)
        kwargs = {"tools": tools or None, **kwargs}
        if turn is None:
            return Match(None, 0, plain, [], tokenizer.encode_chat(plain, **kwargs), key)
        ended = bool(turn.ids) and turn.ids[-1] in tokenizer.eos_ids
        new_ids = tokenizer.encode_after(plain, start - 1, ended=ended, **kwargs)
        return Match(turn, start, plain, self.path_ids(turn), new_ids, key)

    def reserve(self, tokens: int) -> int:
        """A place in the session's stream of draws, so that no two calls share one."""
        first = self.record.next_position
        self.record.next_position += tokens
        return first

    def add(self, match: Match, rollout: Rollout, message: Message, temperature: float) -> None:
        turns = self.record.turns
        turns.append(
            TurnRecord(
                number=len(turns),
                parent=None if match.turn is None else match.turn.number,
                context=match.messages[match.start :],
                context_ids=match.new_ids,
                message=plain_message(message),
                text=rollout.text,
                ids=rollout.response_ids,
                logprobs=rollout.logprobs,
                versions=expand_versions(rollout.weight_versions),
                finish_reason=rollout.finish_reason,
                tools=match.tools,
                temperature=temperature,
            )
        )

    def path_ids(self, turn: TurnRecord) -> list[int]:
        """Every token up to the end of a turn."""
        return [i for t in self._path(turn) for i in (*t.context_ids, *t.ids)]

    def segments(self) -> list[Segment]:
        """One per leaf of the tree, in the order in which the leaves were recorded."""
        parents = {t.parent for t in self.record.turns}
        claimed: set[int] = set()
        out: list[Segment] = []
        for leaf in (t for t in self.record.turns if t.number not in parents):
            path = self._path(leaf)
            own = [t for t in path if t.number not in claimed]
            claimed |= {t.number for t in own}
            rollout = self._rollout(path, len(path) - len(own))
            out.append(Segment(rollout, self._shared(rollout, out), [t.number for t in own]))
        return out

    def main_rollout(self) -> Rollout | None:
        """The segment with the most sampled tokens, which is what a run trains on; None when nothing was recorded."""
        segments = self.segments()
        return max((s.rollout for s in segments), key=lambda r: sum(r.loss_mask), default=None)

    def _deepest(
        self, parent: TurnRecord | None, messages: list[str], start: int, tools: str
    ) -> tuple[TurnRecord | None, int]:
        best: tuple[TurnRecord | None, int] = (parent, start)
        number = None if parent is None else parent.number
        for turn in self.record.turns:
            answer = start + len(turn.context)
            if turn.parent != number or turn.tools != tools or answer >= len(messages):
                continue
            seen = [_canonical(m) for m in (*turn.context, turn.message)]
            if messages[start : answer + 1] == seen:
                found = self._deepest(turn, messages, answer + 1, tools)
                best = found if found[1] > best[1] else best
        return best

    def _path(self, turn: TurnRecord) -> list[TurnRecord]:
        path = [turn]
        while (parent := path[-1].parent) is not None:
            path.append(self.record.turns[parent])
        return path[::-1]

    def _rollout(self, path: list[TurnRecord], known: int) -> Rollout:
        """The first `known` turns are trained elsewhere: here they are part of the prompt."""
        transcript = Transcript([])
        for index, turn in enumerate(path):
            transcript.add_context(turn.context_ids)
            if index < known:
                transcript.add_context(turn.ids)
            else:
                transcript.add_sampled(turn.ids, turn.logprobs, turn.versions)
        last, record = path[-1], self.record
        episode = Episode(str(record.state), record.reward)
        return transcript.rollout(
            record.group_id,
            record.sample_index,
            text=last.text,
            finish_reason=last.finish_reason,
            episode=episode,
        )

    def _shared(self, rollout: Rollout, earlier: list[Segment]) -> int:
        ids = [*rollout.prompt_ids, *rollout.response_ids]
        others = ([*s.rollout.prompt_ids, *s.rollout.response_ids] for s in earlier)
        return max((_common(ids, other) for other in others), default=0)


def canonical_tools(tools: Any) -> str:
    return json.dumps(tools, sort_keys=True) if tools else ""


def _canonical(message: Message) -> str:
    """Messages are the same when these are equal: role, words, calls. White space around an assistant's words does not
    count, as clients trim it; neither does how a call's arguments are written, nor fields that clients add."""
    content = message["content"].strip() if message.get("role") == "assistant" else message["content"]
    calls = [(c.get("id"), c["function"]["name"], c["function"]["arguments"]) for c in message.get("tool_calls", ())]
    return json.dumps([message.get("role"), content, calls, message.get("tool_call_id")], sort_keys=True)


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def restore(data: Any) -> SessionRecord:
    """A record from `export`'s JSON. Raises QuintetError for anything else."""
    try:
        record = msgspec.convert(data, SessionRecord)
    except msgspec.ValidationError as error:
        raise QuintetError(f"this is no exported session: {error}") from None
    for number, turn in enumerate(record.turns):
        lengths = {len(turn.ids), len(turn.logprobs), len(turn.versions)}
        in_order = turn.parent is None or 0 <= turn.parent < number
        if turn.number != number or not in_order or len(lengths) > 1:
            raise QuintetError(f"this is no exported session: turn {number} does not fit the others")
    return record
