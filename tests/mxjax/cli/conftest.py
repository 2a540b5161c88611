"""Commands that must fail, many at once."""

import pytest

from mxjax.cli.main import main


@pytest.fixture
def refuses(capsys):
  """Runs commands that must fail; tells all that do not answer with their text.

  The parser answers in two lines, the second of which names the help, a command in one.
  """

  def run(cases):
    wrong = []
    for words, text in cases:
      words = words.split() if isinstance(words, str) else list(map(str, words))
      capsys.readouterr()
      try:
        code, lines = main(words), 1
      except SystemExit as stop:
        code, lines = stop.code, 2
      said = capsys.readouterr().err.splitlines()[-lines:]
      is_named = said[0].startswith("mxjax") and ("--help" in said[-1]) == (lines == 2)
      if code != 2 or not is_named or text not in said[0]:
        wrong.append((words, text, code, said))
    assert not wrong, "\n".join(map(str, wrong))

  return run
