"""`mxjax completion`: prints what makes a shell complete commands and options."""

import argparse
from typing import Any

from mxjax import methods
from mxjax.evaluation.tasks import tasks

SCRIPT = """\
# mxjax completion; bash: eval "$(mxjax completion bash)", zsh likewise, after compinit.
{zsh}_mxjax() {{
  local word="${{COMP_WORDS[COMP_CWORD]}}" place="" one
  for one in "${{COMP_WORDS[@]:1:$((COMP_CWORD-1))}}"; do
    case "$place $one" in
{places}
    esac
  done
  local words=""
  case "$place|${{COMP_WORDS[COMP_CWORD-1]}}" in
{choices}
    *) case "$place" in
{options}
    esac ;;
  esac
  # Of a list with commas, the last part is completed behind the others.
  local before="" part="${{word##*,}}"
  [ "$part" = "$word" ] || before="${{word%,*}},"
  COMPREPLY=($(compgen -P "$before" -W "$words" -- "$part"))
  # Without a word that fits, the shell offers files.
  [ ${{#COMPREPLY[@]}} -gt 0 ] || COMPREPLY=($(compgen -f -- "$word"))
}}
complete -F _mxjax mxjax
"""
ZSH = "autoload -U +X bashcompinit && bashcompinit\n"
NAMES = {
  "--method": tuple(methods.METHODS),
  "--methods": ("all", "paper", *methods.METHODS),
  "--tasks": ("all", *tasks.SEVEN),
}
"""What begins a value that argparse does not limit: methods may have options."""


def add_parser(commands: Any) -> None:
  """Adds the command and its options."""
  parser = commands.add_parser(
    "completion",
    help="what makes bash or zsh complete commands and options",
    description='Prints a script: eval "$(mxjax completion bash)" in ~/.bashrc.',
  )
  parser.add_argument("shell", choices=("bash", "zsh"), help="the shell that reads it")
  parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
  """Prints the script of the shell."""
  from mxjax.cli.main import build_parser

  print(script(build_parser(), options.shell), end="")


def script(parser: argparse.ArgumentParser, shell: str) -> str:
  """Returns the script that completes what `parser` takes, for `bash` or `zsh`."""
  places: list[str] = []
  choices: list[str] = []
  options: list[str] = []

  def walk(parser: argparse.ArgumentParser, place: str) -> None:
    words = []
    # argparse has no public list of them.
    for action in parser._actions:
      words += [name for name in action.option_strings if name.startswith("--")]
      if isinstance(action, argparse._SubParsersAction):
        words += list(action.choices)
        for name, below in action.choices.items():
          path = f"{place} {name}".strip()
          places.append(f'      "{place} {name}") place="{path}" ;;')
          walk(below, path)
      elif action.option_strings and (
        known := action.choices or NAMES.get(action.option_strings[-1])
      ):
        listed = " ".join(map(str, known))
        named = "|".join(f'"{place}|{name}"' for name in action.option_strings)
        choices.append(f'    {named}) words="{listed}" ;;')
    options.append(f'      "{place}") words="{" ".join(words)}" ;;')

  walk(parser, "")
  return SCRIPT.format(
    zsh=ZSH if shell == "zsh" else "",
    places="\n".join(places),
    choices="\n".join(choices),
    options="\n".join(options),
  )
