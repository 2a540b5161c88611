"""Whatever reading a file raises becomes a refusal that names the file."""

import pathlib

import pydantic
import pytest

from mxjax import errors
from mxjax.intake import reading


def refused(path, error):
  with pytest.raises(errors.Refusal) as caught:
    with reading.refusing(path, "a config", "copy it"):
      raise error
  return caught.value


@pytest.mark.parametrize("got", ["a dog", "a cat, got wet; fed: expected none"])
def test_a_refusal_elsewhere_gets_the_file_whatever_its_words(tmp_path, got):
  error = errors.TypeRefusal("config.json", "a cat", got, "feed it")
  told = refused(tmp_path / "file", error)
  assert type(told) is errors.TypeRefusal and told.__cause__ is error
  assert told.place == str(tmp_path / "file")
  assert (told.expected, told.got, told.mend) == ("a cat", got, "feed it")


def test_a_refusal_of_the_file_or_of_opening_one_passes(tmp_path):
  path = tmp_path / "file"
  for error in (
    errors.ValueRefusal(f"export: {path}", "a cat", "a dog"),
    errors.FileNotFoundRefusal("beside", "another file", "none"),
  ):
    assert refused(path, error) is error


@pytest.mark.parametrize(
  ("error", "kind"),
  [
    (ValueError("foo: expected a cat, got a dog; feed it."), errors.ValueRefusal),
    (KeyError("x"), errors.ValueRefusal),
    (FileNotFoundError(2, "none"), errors.FileNotFoundRefusal),
    (PermissionError(13, "no"), errors.OSRefusal),
    (NotImplementedError(), errors.NotImplementedRefusal),
  ],
  ids=lambda value: type(value).__name__,
)
def test_other_errors_are_described_after_what_is_expected(tmp_path, error, kind):
  (tmp_path / "file").write_text("abc")
  told = refused(tmp_path / "file", error)
  assert type(told) is kind and told.__cause__ is error
  assert (told.place, told.expected) == (str(tmp_path / "file"), "a config")
  assert told.got.startswith(f"3 bytes that do not read ({type(error).__name__}")
  assert told.mend == "copy it"


def test_files_are_bounded_and_their_structure_is_checked(tmp_path):
  path = tmp_path / "file.json"
  with pytest.raises(errors.FileNotFoundRefusal) as caught:
    reading.read_json(path, dict[str, int], "numbers")
  assert caught.value.place == str(tmp_path)
  path.write_text('{"a": 1}')
  assert reading.read_json(path, dict[str, int], "numbers") == {"a": 1}
  with pytest.raises(errors.ValueRefusal, match="at most 3 bytes, got 8"):
    reading.read_bytes(path, limit=3)
  with pytest.raises(errors.ValueRefusal) as caught:
    reading.read_json(path, dict[str, bool], "truths")
  assert caught.value.place == str(pathlib.Path(path))
  assert isinstance(caught.value.__cause__, pydantic.ValidationError)
