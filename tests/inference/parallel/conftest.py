"""Four real processes, shared by the tests of a file."""

from collections.abc import Iterator

import pytest

from tests.inference.parallel.ranks import Ranks


@pytest.fixture(scope="package")
def four_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    ranks = Ranks(4, tmp_path_factory.mktemp("ranks"))
    yield ranks
    ranks.close()
