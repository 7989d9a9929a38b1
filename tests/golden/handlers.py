"""`fn` of a case -> function of quintet."""

from __future__ import annotations

from .handlers_advantage import ADVANTAGE_HANDLERS
from .handlers_loss import LOSS_HANDLERS
from .handlers_misc import MISC_HANDLERS
from .handlers_offpolicy import OFFPOLICY_HANDLERS
from .runner import Handler

HANDLERS: dict[str, Handler] = {**ADVANTAGE_HANDLERS, **LOSS_HANDLERS, **OFFPOLICY_HANDLERS, **MISC_HANDLERS}
