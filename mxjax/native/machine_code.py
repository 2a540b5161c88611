"""Compiles LLVM's language for this machine's processor."""

import platform
from typing import Any

from llvmlite import binding as llvm


def multiplies_and_adds_at_once() -> bool:
  """Whether the processor has fused multiply-adds, as all but old ones of x86 have."""
  features = llvm.get_host_cpu_features()
  return platform.machine() not in ("x86_64", "AMD64") or bool(features.get("fma"))


class MachineCode:
  """Functions in the memory of this process, as long as this object lives."""

  def __init__(self, source: str) -> None:
    """Compiles a module.

    Args:
      source: The module as text.
    """
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    self._machine: Any = llvm.Target.from_default_triple().create_target_machine(
      cpu=llvm.get_host_cpu_name(),
      features=llvm.get_host_cpu_features().flatten(),
      opt=3,
    )
    module = llvm.parse_assembly(source)
    module.verify()
    self._engine: Any = llvm.create_mcjit_compiler(module, self._machine)
    self._engine.finalize_object()

  def address(self, name: str) -> int:
    """Where a function begins."""
    return self._engine.get_function_address(name)
