"""transformers draws a progress bar for every load; a run has its own view, so they are off while it loads."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """No progress bars and no advice below the level of an error inside the block; as before after it."""
    from transformers.utils import logging

    bars, verbosity = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


@contextmanager
def quiet_peft() -> Iterator[None]:
    """Without the warning that peft asks a model for `is_gradient_checkpointing`, a name that transformers gave up: it
    is about peft's code, and nothing here can be changed to mend it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
        yield
