"""The `args` of a reward function as a checked object. Not imported in workers, where pydantic costs start-up."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from quintet.types import QuintetError

Options = TypeVar("Options", bound=BaseModel)


class ModelOptions(BaseModel):
    """Of `fn: model`."""

    model_config = ConfigDict(extra="forbid")

    path: str | None = Field(description="folder or hub id")
    device: str = "auto"
    dtype: Literal["auto", "float32", "bfloat16"] = Field("float32", description="compute dtype of the body")
    label: int | None = Field(None, ge=0, description="which output is the reward; null: the only one")
    reads: Literal["turn", "conversation"] = "turn"
    batch_tokens: int = Field(8192, ge=1, description="padded tokens of one forward pass at most")
    missing_end_penalty: float = Field(0.0, ge=0.0, description="taken off the reward of a response that was cut off")


def parse_options(kind: type[Options], function: str, args: Mapping[str, Any]) -> Options:
    """Raises QuintetError naming the first wrong one, with the nearest valid name."""
    try:
        return kind.model_validate(dict(args))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "args"
        if first["type"] == "extra_forbidden":
            near = difflib.get_close_matches(where, kind.model_fields, n=1)
            mend = f"did you mean `{near[0]}`?" if near else f"it has: {', '.join(kind.model_fields)}"
            raise QuintetError(f"reward function `{function}` has no option `{where}`; {mend}") from error
        raise QuintetError(f"reward function `{function}`, option `{where}`: {first['msg']}") from error
