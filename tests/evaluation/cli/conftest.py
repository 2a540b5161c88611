"""A model folder as people have them: config, weights, a tokenizer and a text."""

import pytest

from tests import tiny


@pytest.fixture(scope="session")
def text():
  return tiny.TEXT


@pytest.fixture(scope="session")
def write_tokenizer():
  return tiny.save_tokenizer


@pytest.fixture(scope="session")
def write_model():
  return tiny.save_folder
