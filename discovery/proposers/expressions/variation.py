"""Draws trees and varies them; every result depends only on the draws' address."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from mxjax.discovery.core import identity
from mxjax.discovery.proposers.expressions.grammar import Grammar, Node

T = TypeVar("T")


class Draws:
  """A stream of choices at an address."""

  def __init__(self, *address: Any) -> None:
    """Starts the stream."""
    self.address, self._count = address, itertools.count()

  def pick(self, options: Sequence[T]) -> T:
    """Returns one of the options."""
    return identity.pick(options, *self.address, next(self._count))


def sampled(grammar: Grammar, kind: str, depth: int, draws: Draws) -> Node:
  """Draws a tree of a type: its production among all that fit, and so its parts."""
  rule = draws.pick(grammar.options(kind, depth))
  params = draws.pick(rule.settings)
  parts = (sampled(grammar, child, depth - 1, draws) for child in rule.takes)
  return Node(rule, params, tuple(parts))


def fresh(grammar: Grammar, hook: str, draws: Draws) -> Node:
  """Draws a tree for a hook, as likely shallow as deep."""
  least = next(d for d in range(grammar.depth + 1) if grammar.options(hook, d))
  return sampled(grammar, hook, draws.pick(range(least, grammar.depth + 1)), draws)


def _renewed(grammar: Grammar, tree: Node, room: int, draws: Draws) -> Node:
  """Returns another tree of the same type."""
  return sampled(grammar, tree.production.type, room, draws)


def _tuned(grammar: Grammar, tree: Node, room: int, draws: Draws) -> Node:
  """Returns the node with other parameters."""
  del grammar, room
  return Node(tree.production, draws.pick(tree.production.settings), tree.children)


def _wrapped(grammar: Grammar, tree: Node, room: int, draws: Draws) -> Node:
  """Returns a production that takes the tree as one of its parts."""
  kind = tree.production.type
  fits = [r for r in grammar.options(kind, room) if kind in r.takes]
  if not fits or tree.depth >= room:
    return tree
  rule = draws.pick(fits)
  place = draws.pick([i for i, child in enumerate(rule.takes) if child == kind])
  parts = tuple(
    tree if i == place else sampled(grammar, child, room - 1, draws)
    for i, child in enumerate(rule.takes)
  )
  return Node(rule, draws.pick(rule.settings), parts)


def _hoisted(grammar: Grammar, tree: Node, room: int, draws: Draws) -> Node:
  """Returns a part of the tree that has its type."""
  del grammar, room
  kind = tree.production.type
  return draws.pick([part for _, part in tree.walk() if part.production.type == kind])


MUTATIONS: tuple[Callable[[Grammar, Node, int, Draws], Node], ...] = (
  _renewed,
  _tuned,
  _tuned,
  _wrapped,
  _hoisted,
)


def mutated(grammar: Grammar, tree: Node, draws: Draws) -> Node:
  """Returns the tree with one part renewed, tuned, wrapped or hoisted."""
  path, part = draws.pick(list(tree.walk()))
  change = draws.pick(MUTATIONS)
  return tree.replaced(path, change(grammar, part, grammar.depth - len(path), draws))


def crossed(grammar: Grammar, tree: Node, donor: Node, draws: Draws) -> Node:
  """Returns the tree with a part of the donor in the place of one of its type."""
  path, part = draws.pick(list(tree.walk()))
  room = grammar.depth - len(path)
  fits = [
    other
    for _, other in donor.walk()
    if other.production.type == part.production.type and other.depth <= room
  ]
  return tree.replaced(path, draws.pick(fits)) if fits else tree


def changed(before: Node | None, after: Node) -> tuple[int, ...]:
  """Returns the way to the smallest part of a tree that holds all that changed.

  It is never the root, which is the hook itself and takes one part.
  """
  path: tuple[int, ...] = ()
  while before is not None and (before.production, before.params) == (
    after.production,
    after.params,
  ):
    pairs = enumerate(zip(before.children, after.children, strict=True))
    differing = [index for index, (old, new) in pairs if old != new]
    if len(differing) != 1:
      break
    path += (differing[0],)
    before, after = before.children[path[-1]], after.children[path[-1]]
  return path or (0,)
