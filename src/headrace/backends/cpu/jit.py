"""From a format's Python kernel to machine code: llvmlite builds it, a file keeps it.

A kernel is a C-callable function of int64s, compiled on first use and stored as an object file in the folder of
cache.py, under a name that covers the processor and the instruction set.
"""

import hashlib
from functools import cache as once
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir

from . import cache, simd
from .simd import I64, Emit, V

for _start in ("initialize_native_target", "initialize_native_asmprinter"):
    getattr(llvm, _start)()


def _features() -> tuple[str, str]:
    """LLVM's CPU name and features: this processor's, or a lesser one's that matches an instruction set asked for."""
    lesser = {"avx2": "haswell", "generic": "x86-64-v3"}.get(simd.ISA)
    if lesser and simd.detected_isa() != simd.ISA:
        return lesser, ""
    return llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten()


class Jit:
    """One LLVM engine; it owns the code, so it lives as long as the process."""

    def __init__(self) -> None:
        cpu, features = _features()
        triple = llvm.get_process_triple()
        make = llvm.Target.from_triple(triple).create_target_machine
        options: dict[str, Any] = {
            "cpu": cpu,
            "features": features,
            "opt": 3,
            "reloc": "pic",
            "codemodel": "jitdefault",
        }
        self.machine = make(**options)
        self.engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), make(**options))
        key = f"{cpu} {features} {simd.ISA} {llvm.llvm_version_info}"
        self.key = hashlib.sha256(key.encode()).hexdigest()[:16]
        self.addresses: dict[str, int] = {}

    def address(self, name: str, n_args: int, emit: Any) -> int:
        """The address of `void name(int64 x n_args)`, whose body emit(e, *args) writes."""
        if name in self.addresses:
            return self.addresses[name]
        with cache.timed():
            path = cache.folder() / f"{self.key}-{name}.o"
            code = cache.read(path)
            if code is None:
                cache.compiling(name)
                code = self.machine.emit_object(self._optimized(_module(name, n_args, emit)))
                cache.write(path, code)
            self.engine.add_object_file(llvm.ObjectFileRef.from_data(code))
            self.engine.finalize_object()
            self.addresses[name] = self.engine.get_function_address(name)
        return self.addresses[name]

    def _optimized(self, text: str) -> Any:
        module = llvm.parse_assembly(text)
        module.verify()
        passes = llvm.create_pass_builder(self.machine, llvm.create_pipeline_tuning_options(speed_level=2))
        passes.getModulePassManager().run(module, passes)
        return module


def _module(name: str, n_args: int, emit: Any) -> str:
    module = ir.Module(name)
    fn = ir.Function(module, ir.FunctionType(ir.VoidType(), [I64] * n_args), name)
    e = Emit(ir.IRBuilder(fn.append_basic_block()))
    emit(e, *(V(e, a) for a in fn.args))
    e.b.ret_void()
    return str(module)


@once
def jit() -> Jit:
    return Jit()
