"""Numba functions that work on plain addresses: how ops are defined, compiled once, and read their memory.

An op is a function of three int64, compiled to a C function pointer on first use:

    @op
    def add(tid, team, a):
        x, y, n = i64(a, 0), i64(a, 1), i64(a, 2)       # arguments: an int64 array at address a
        for i in range(tid, n, size(team)):
            put_f32(x, i, f32(x, i) + f32(y, i))

Addresses instead of arrays: weights may lie at any byte of a mapped file, and a call unboxes nothing. Everything is
int64 inside, `f32`, `i32`, ... read element i of an array of that type. `inner` marks the helpers that ops share; they
are compiled into each op. A float argument travels as the bits of a float64 (`float_bits`, read back by `f64`).
`entry` makes a function of int64s that Python calls, without the GIL.
"""

import ctypes
import hashlib
import pickle
import platform
import struct
import sys
from contextlib import contextmanager
from functools import cached_property

from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.core.caching import CompileResultCacheImpl, FunctionCache, _CacheLocator
from numba.core.ccallback import CFunc
from numba.core.codegen import JITCodeLibrary
from numba.core.registry import cpu_target
from numba.core.runtime import rtsys
from numba.core.serialize import dumps
from numba.extending import intrinsic

from . import cache

MACHINE = platform.machine().lower()
OPTIONS = {"nopython": True, "error_model": "numpy"}
inner = njit(nogil=True, error_model="numpy")


class _Locator(_CacheLocator):
    """Numba's own locators look at the caching function's file only; ours at every source (see cache.py)."""

    def __init__(self, py_func, py_file):
        self._py_file, self._line = py_file, py_func.__code__.co_firstlineno

    @classmethod
    def from_function(cls, py_func, py_file):
        return cls(py_func, py_file)

    def ensure_cache_path(self):
        cache.folder().mkdir(parents=True, exist_ok=True)

    def get_cache_path(self):
        return str(cache.folder())

    def get_source_stamp(self):
        return cache.source_key()

    def get_disambiguator(self):
        return str(self._line)


class _Impl(CompileResultCacheImpl):
    _locator_classes = [_Locator]  # noqa: RUF012


class _Library(JITCodeLibrary):
    """A module of LLVM code that becomes machine code only if it goes to the cache: an op does, a helper is just linked
    into its callers. Numba would compile helpers for themselves, which takes time and rewrites the module that it then
    links; optimised again, such a module may be wrong (LLVM 22 dropped a remainder row)."""

    def _optimize_final_module(self):
        if self._object_caching_enabled:
            super()._optimize_final_module()

    def _finalize_final_module(self):
        if self._object_caching_enabled:
            super()._finalize_final_module()
        else:
            self._finalize_dynamic_globals()
            self._finalized = True


@contextmanager
def _libraries(kind):
    """What numba makes its libraries with."""
    codegen = cpu_target.target_context.codegen()
    usual, codegen._library_class = codegen._library_class, kind
    try:
        yield
    finally:
        codegen._library_class = usual


class _Files:
    """What numba asks of its index and data files, as one file a function and processor, with a checksum: numba would
    run damaged machine code."""

    def __init__(self, base):
        self._base = base

    def _path(self, key):
        return cache.folder() / f"{self._base}-{hashlib.sha256(repr(key).encode()).hexdigest()[:16]}.nbc"

    def load(self, key):
        body = cache.read(self._path(key))
        return None if body is None else pickle.loads(body)

    def save(self, key, data):
        cache.write(self._path(key), dumps(data))


class _Cache(FunctionCache):
    """Numba's function cache in our folder; a file that cannot be read, understood or written counts as absent."""

    _impl_class = _Impl

    def __init__(self, py_func):
        super().__init__(py_func)
        self._cache_file = _Files(self._impl.filename_base)

    def load_overload(self, sig, target_context):
        try:
            rtsys.initialize(target_context)  # instead of all of numba's type registries: 0.03 s, not 0.15
            found = self._load_overload(sig, target_context)
        except Exception:
            found = None
        if found is None:
            cache.compiling(self._py_func.__name__)
        return found

    def save_overload(self, sig, data):
        try:
            super().save_overload(sig, data)
        except Exception:
            return


class Native:
    """A function of int64s compiled on first use; `address` is its C function pointer."""

    def __init__(self, fn, returns=types.void):
        self.fn, self.returns = fn, returns
        self.n_args = fn.__code__.co_argcount
        self.__doc__, self.__name__ = fn.__doc__, fn.__name__

    @cached_property
    def _compiled(self):
        signature = ([types.int64] * self.n_args, self.returns)
        made = CFunc(self.fn, signature, locals={}, options=OPTIONS)
        made._cache = _Cache(self.fn)
        with cache.timed(), _libraries(_Library):
            made.compile()
        return made

    @property
    def address(self):
        return self._compiled.address

    @cached_property
    def call(self):
        """The function for Python: ctypes drops the GIL around it, and no signal handler runs inside."""
        returns = None if self.returns is types.void else ctypes.c_int64
        return ctypes.CFUNCTYPE(returns, *[ctypes.c_int64] * self.n_args)(self.address)


def op(fn):
    """A step of a team's program: void fn(tid, team, args)."""
    return Native(fn)


def entry(fn):
    """A function of int64s returning int64, called from Python as fn.call(...)."""
    return Native(fn, types.int64)


def float_bits(value):
    """A float as an op argument."""
    return struct.unpack("<q", struct.pack("<d", value))[0]


# memory ---------------------------------------------------------------------------------------------------------------

_I32, _I64 = ir.IntType(32), ir.IntType(64)


def _pointer(b, address, ty, index=None):
    p = b.inttoptr(address, ty.as_pointer())
    return p if index is None else b.gep(p, [index], source_etype=ty)


def _reader(ty, result, widen=None):
    def fn(tyctx, address, i):
        def codegen(ctx, b, sig, args):
            v = b.load(_pointer(b, args[0], ty, args[1]), typ=ty, align=1)
            return getattr(b, widen)(v, _I64) if widen else v

        return result(types.int64, types.int64), codegen

    return intrinsic(fn)


def _writer(ty, value, narrow=False):
    def fn(tyctx, address, i, v):
        def codegen(ctx, b, sig, args):
            v = b.trunc(args[2], ty) if narrow else args[2]
            b.store(v, _pointer(b, args[0], ty, args[1]), align=1)
            return ctx.get_dummy_value()

        return types.void(types.int64, types.int64, value), codegen

    return intrinsic(fn)


# Element i of the array at an address: no bounds, no alignment needed.
i64 = _reader(_I64, types.int64)
i32 = _reader(_I32, types.int64, "sext")
u16 = _reader(ir.IntType(16), types.int64, "zext")
i8 = _reader(ir.IntType(8), types.int64, "sext")
u8 = _reader(ir.IntType(8), types.int64, "zext")
f32 = _reader(ir.FloatType(), types.float32)
f64 = _reader(ir.DoubleType(), types.float64)
put_i64 = _writer(_I64, types.int64)
put_i32 = _writer(_I32, types.int64, narrow=True)
put_u16 = _writer(ir.IntType(16), types.int64, narrow=True)
put_f32 = _writer(ir.FloatType(), types.float32)


@intrinsic
def f16(tyctx, address, i):
    """Element i of an array of IEEE halves, as float32. Integer arithmetic: without F16C, LLVM would call a library
    function that is not there. Subnormals are right, infinities and NaNs become large numbers."""

    def codegen(ctx, b, sig, args):
        f = ir.FloatType()
        h = b.zext(b.load(_pointer(b, args[0], ir.IntType(16), args[1]), typ=ir.IntType(16), align=1), _I32)
        magnitude = b.bitcast(b.shl(b.and_(h, _I32(0x7FFF)), _I32(13)), f)
        magnitude = b.bitcast(b.fmul(magnitude, ir.Constant(f, 2.0**112)), _I32)
        return b.bitcast(b.or_(magnitude, b.shl(b.and_(h, _I32(0x8000)), _I32(16))), f)

    return types.float32(types.int64, types.int64), codegen


@intrinsic
def bits_f32(tyctx, v):
    """The float32 whose bits are the low half of v."""

    def codegen(ctx, b, sig, args):
        return b.bitcast(b.trunc(args[0], _I32), ir.FloatType())

    return types.float32(types.int64), codegen


@intrinsic
def copy(tyctx, dst, src, n):
    """Copies n bytes."""

    def codegen(ctx, b, sig, args):
        byte = ir.IntType(8)
        cgutils.raw_memcpy(b, _pointer(b, args[0], byte), _pointer(b, args[1], byte), args[2], 1)
        return ctx.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), codegen


# atomics, calls -------------------------------------------------------------------------------------------------------


@intrinsic
def atomic_add(tyctx, address, v):
    """Adds; returns what was there before."""

    def codegen(ctx, b, sig, args):
        return b.atomic_rmw("add", _pointer(b, args[0], _I64), args[1], "seq_cst")

    return types.int64(types.int64, types.int64), codegen


@intrinsic
def exchange(tyctx, address, v):
    def codegen(ctx, b, sig, args):
        return b.atomic_rmw("xchg", _pointer(b, args[0], _I64), args[1], "seq_cst")

    return types.int64(types.int64, types.int64), codegen


@intrinsic
def load_sync(tyctx, address):
    def codegen(ctx, b, sig, args):
        return b.load_atomic(_pointer(b, args[0], _I64), "seq_cst", 8, typ=_I64)

    return types.int64(types.int64), codegen


@intrinsic
def store_release(tyctx, address, v):
    def codegen(ctx, b, sig, args):
        b.store_atomic(args[1], _pointer(b, args[0], _I64), "release", 8)
        return ctx.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


def _external(b, name, result, *arg_types):
    return cgutils.get_or_insert_function(b.module, ir.FunctionType(result, arg_types), name)


@intrinsic
def pause(tyctx):
    """Tells the core that it spins."""

    def codegen(ctx, b, sig, args):
        if MACHINE in ("x86_64", "amd64"):
            b.call(_external(b, "llvm.x86.sse2.pause", ir.VoidType()), [])
        elif MACHINE in ("aarch64", "arm64"):
            b.call(_external(b, "llvm.aarch64.hint", ir.VoidType(), _I32), [_I32(1)])
        return ctx.get_dummy_value()

    return types.void(), codegen


@intrinsic
def yield_core(tyctx):
    """Lets the scheduler run another thread."""

    def codegen(ctx, b, sig, args):
        b.call(_external(b, "SwitchToThread" if sys.platform == "win32" else "sched_yield", _I32), [])
        return ctx.get_dummy_value()

    return types.void(), codegen


def _caller(n):
    def codegen(ctx, b, sig, args):
        kind = ir.FunctionType(ir.VoidType(), [_I64] * n)
        b.call(b.inttoptr(args[0], kind.as_pointer()), args[1:])
        return ctx.get_dummy_value()

    return types.void(*[types.int64] * (n + 1)), codegen


@intrinsic
def call3(tyctx, fn, a, b, c):
    """Calls the C function void(int64, int64, int64) at address fn."""
    return _caller(3)
