"""One warm sandbox per back end for all tests of a worker process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.sandbox.boxes import Box, make_box


@pytest.fixture(scope="session", params=["process", "namespace"])
def box(request: pytest.FixtureRequest) -> Iterator[Box]:
    yield from _opened(make_box(request.param))


@pytest.fixture(scope="session")
def jail() -> Iterator[Box]:
    """The one that isolates."""
    yield from _opened(make_box("namespace"))


def _opened(box: Box) -> Iterator[Box]:
    yield box
    box.close()
