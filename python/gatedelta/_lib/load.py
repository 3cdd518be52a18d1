"""Loads the library, and calls it: errors as exceptions, sizes, what the environment forces, threads."""

from __future__ import annotations

import ctypes
import functools
import os
from ctypes import byref, c_size_t, c_void_p
from pathlib import Path

from .structs import (
    INVALID_ARGUMENT,
    ISA_COUNT,
    KERNELS,
    OK,
    SIGNATURES,
    UNSUPPORTED,
    WORKSPACE_TOO_SMALL,
    Exec,
    Info,
)


class UnsupportedError(NotImplementedError):
    """The call is legal, but this build or device cannot serve it."""


def library_directory() -> Path:
    """Where the shared libraries are: GATEDELTA_LIBRARY_DIR, or beside the installed package's files."""
    override = os.environ.get("GATEDELTA_LIBRARY_DIR")
    return Path(override) if override else Path(__file__).parent.parent / "lib"


def library_path(name: str) -> Path:
    """The file of one of our shared libraries, 'gatedelta' or 'gatedelta_torch'."""
    directory = library_directory()
    found = sorted(directory.glob(f"lib{name}.so*"), key=lambda path: len(path.name))
    if not found:
        raise ImportError(
            f"lib{name}.so is not in {directory}. Install the package (pip install .), or point "
            "GATEDELTA_LIBRARY_DIR at the folder of a build that holds it."
        )
    return found[0]


@functools.cache
def library() -> ctypes.CDLL:
    """libgatedelta, loaded once."""
    lib = ctypes.CDLL(str(library_path("gatedelta")))
    for name, (result, arguments) in SIGNATURES.items():
        function = getattr(lib, name)
        function.restype, function.argtypes = result, arguments
    return lib


def check(status: int) -> None:
    """Raises what a status other than GD_OK means, with the library's message."""
    if status == OK:
        return
    message = library().gd_last_error().decode()
    if status in (INVALID_ARGUMENT, WORKSPACE_TOO_SMALL):
        raise ValueError(message)
    if status == UNSUPPORTED:
        raise UnsupportedError(message)
    raise RuntimeError(message)


def isa_name(isa: int) -> str:
    return library().gd_isa_name(isa).decode()


@functools.cache
def forced_isa() -> int:
    """GATEDELTA_ISA as a gd_isa value; read once."""
    wanted = os.environ.get("GATEDELTA_ISA")
    if not wanted:
        return 0
    names = [isa_name(i) for i in range(ISA_COUNT)]
    if wanted not in names:
        raise ValueError(f"GATEDELTA_ISA is {wanted!r}, which is none of {', '.join(names)}")
    isa, info = names.index(wanted), get_info()
    if isa and not info.cpu_isa_usable >> isa & 1:
        reason = "this machine cannot run" if info.cpu_isa_compiled >> isa & 1 else "is not in this build"
        raise UnsupportedError(f"GATEDELTA_ISA is {wanted}, which {reason}")
    return isa


@functools.cache
def forced_kernels() -> int:
    """GATEDELTA_KERNELS as a gd_kernels value; read once."""
    wanted = os.environ.get("GATEDELTA_KERNELS") or "auto"
    if wanted not in KERNELS:
        raise ValueError(f"GATEDELTA_KERNELS is {wanted!r}, which is none of {', '.join(KERNELS)}")
    return KERNELS[wanted]


@functools.cache
def thread_pool(num_threads: int, process: int) -> c_void_p:
    """A pool that lives as long as the process; threads do not survive a fork, hence one per process."""
    pool = c_void_p()
    check(library().gd_thread_pool_create(num_threads, byref(pool)))
    return pool


def set_threads(call: Exec, num_threads: int) -> None:
    """Lets a call on the CPU run on a pool of so many threads; 0: one for every CPU of the process."""
    call.isa = forced_isa()
    call.num_threads = 1
    if num_threads == 1:
        return
    lib = library()
    pool = thread_pool(num_threads, os.getpid())
    call.num_threads = lib.gd_thread_pool_size(pool)
    call.parallel_for = ctypes.cast(lib.gd_thread_pool_parallel_for, c_void_p)
    call.parallel_for_context = pool


def get_info() -> Info:
    info = Info()
    check(library().gd_get_info(byref(info)))
    return info


def size_query(query: str, args: ctypes.Structure) -> int:
    """Runs a gd_*_workspace or gd_forward_saved_size query."""
    size = c_size_t()
    check(getattr(library(), query)(byref(args), byref(size)))
    return size.value
