"""What tests of the command line share."""

import logging

import pytest
import yaml

from tests.m3rl.run_files import settings, write_model


@pytest.fixture
def file(tmp_path):
    """Path of a configuration of a model that is there."""
    write_model(tmp_path / "model")
    path = tmp_path / "c.yaml"
    path.write_text(yaml.safe_dump(settings(tmp_path)))
    return str(path)


@pytest.fixture
def quiet_logging():
    """`main` sets up logging for a process; tests keep their own."""
    root = logging.getLogger()
    before = root.level, list(root.handlers)
    yield
    root.setLevel(before[0])
    root.handlers[:] = before[1]
