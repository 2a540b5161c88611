"""Renders trees as hooks of ordinary source, and reads them back from it."""

import ast
import re

from mxjax.discovery.core.candidate_source import with_functions, with_plan
from mxjax.discovery.core.interface import Interface
from mxjax.discovery.proposers.expressions.grammar import Grammar, Node

ATOM = re.compile(r"\w+(\['\w+'\])?")
"""Code that is written where it is used, without a line and a name of its own."""


def code(grammar: Grammar, interface: Interface, tree: Node) -> str:
  """Returns the hook of a tree with the helpers that it calls.

  Every part has a line, once however often it occurs; the docstring holds the text of
  the tree.
  """
  names: dict[Node, str] = {}
  lines: list[str] = []
  helpers: dict[str, str] = {}

  def value(node: Node) -> str:
    if node in names:
      return names[node]
    parts = [value(child) for child in node.children]
    rule = node.production
    for name in rule.uses:
      helpers.setdefault(name, grammar.helpers[name])
    text = rule.code
    for index, part in enumerate(parts):
      text = text.replace(f"{{{index}}}", part)
    for name, setting in node.params:
      text = text.replace(f"{{{name}}}", repr(setting))
    names[node] = text
    if not ATOM.fullmatch(text):
      names[node] = f"{rule.name}_{len(lines) + 1}"
      lines.append(f"{names[node]} = {text}")
    return names[node]

  value(tree)
  hook = tree.production.name
  arguments = ", ".join(interface.hook(hook).arguments)
  body = [f'"""{tree.text}"""', *lines, f"return {names[tree]}"]
  made = [f"def {hook}({arguments}):", *("  " + line for line in body)]
  return "\n\n".join([*helpers.values(), "\n".join(made)]) + "\n"


def applied(source: str, grammar: Grammar, interface: Interface, tree: Node) -> str:
  """Returns a program with a tree as its hook and the plan that the tree asks for."""
  plan = {k: v for k, v in tree.params if k in tree.production.plan}
  return with_plan(with_functions(source, code(grammar, interface, tree)), plan)


def trees(source: str, grammar: Grammar, interface: Interface) -> dict[str, Node]:
  """Returns the trees of a program's hooks, without those written in another way.

  A hook that is as inherited has the tree that the grammar says it amounts to.
  """
  written = {
    node.name: node
    for node in ast.parse(source).body
    if isinstance(node, ast.FunctionDef)
  }
  found: dict[str, Node] = {}
  for hook in grammar.hooks:
    (default,) = ast.parse(interface.hook(hook).default).body
    node = written.get(hook, default)
    assert isinstance(node, ast.FunctionDef)
    text, is_default = ast.unparse(node), ast.unparse(node) == ast.unparse(default)
    told = grammar.defaults.get(hook) if is_default else ast.get_docstring(node)
    try:
      tree = grammar.parse(told or "", hook)
    except ValueError:
      continue
    if is_default or text in with_functions("", code(grammar, interface, tree)):
      found[hook] = tree
  return found
