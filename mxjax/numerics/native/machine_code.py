"""Compilation of LLVM IR for this machine's processor."""

import platform
from collections.abc import Iterable
from typing import Any

from llvmlite import binding as llvm


def multiplies_and_adds_at_once() -> bool:
  """Returns whether the processor has fused multiply-add, which old x86 ones lack."""
  features = llvm.get_host_cpu_features()
  return platform.machine() not in ("x86_64", "AMD64") or bool(features.get("fma"))


def compile_module(source: str, names: Iterable[str]) -> dict[str, int]:
  """Compiles LLVM IR text into this process and returns the addresses of functions.

  The code is never freed, because XLA's threads may still run it at process exit.
  """
  llvm.initialize_native_target()
  llvm.initialize_native_asmprinter()
  machine: Any = llvm.Target.from_default_triple().create_target_machine(
    cpu=llvm.get_host_cpu_name(),
    features=llvm.get_host_cpu_features().flatten(),
    opt=3,
  )
  module = llvm.parse_assembly(source)
  module.verify()
  engine: Any = llvm.create_mcjit_compiler(module, machine)
  engine.finalize_object()
  addresses = {name: engine.get_function_address(name) for name in names}
  engine.detach()
  return addresses
