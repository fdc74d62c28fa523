"""Builds the stand-in for a CUDA card for the torch of this environment.

    python tests/card/stand_in/build.py FOLDER      # FOLDER/libcuda.so.1; a second, needs gcc and nm

The C files here hold the functions that do something. Every other function that torch, Triton or inductor imports from
CUDA's runtime and driver, cuBLAS and cuDNN is written by this script: it succeeds without doing anything.
"""

from __future__ import annotations

import re
import subprocess
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path

HERE = Path(__file__).parent
SITE = Path(sysconfig.get_paths()["purelib"])
SOURCES = ("card.c", "runtime.c", "driver.c", "libraries.c")
LIBRARIES = ("libc10_cuda.so", "libtorch_cuda.so", "libtorch_cuda_linalg.so", "libtorch_python.so")
KEPT = re.compile(r"__cuda(?!GetKernel|LaunchKernel)|cudaGetError|cudnnGet(Cudart)?Version|cudnnGet\w*ErrorString")
"""Functions that only read or write the host's memory; the real libraries keep them."""
CREATES = re.compile(r"cudnnCreate\w*")
"""Functions whose first argument receives a handle."""
DRIVER = """
cuCtxPushCurrent_v2 cuCtxSetCurrent cuCtxSetLimit cuFuncSetAttribute cuFuncSetCacheConfig cuLaunchCooperativeKernel
cuLaunchKernel cuLaunchKernelEx cuLinkAddData_v2 cuLinkComplete cuLinkCreate_v2 cuMemAddressFree cuMemMap cuMemSetAccess
cuModuleUnload cuStreamWriteValue32 cuTensorMapEncodeTiled
"""
"""Functions of the driver that are found by name when they are called, so that no library's table lists them."""


def main() -> None:
    """Write the functions that do nothing, and compile all into the folder named on the command line."""
    folder = Path(sys.argv[1]).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    rest = folder / "rest.c"
    rest.write_text("\n".join(["#include <card.h>", *_functions(sorted(_needed() - _written()))]) + "\n")
    library = folder / "libcuda.so.1"
    sources = [str(HERE / name) for name in SOURCES] + [str(rest)]
    folders = [f"-I{found}" for found in (HERE, *_headers())]
    options = ["-O1", "-shared", "-fPIC", "-Wall", "-Wno-unused-parameter", "-Wl,-soname,libcuda.so.1"]
    subprocess.run(["gcc", *options, *folders, *sources, "-o", str(library), "-ldl", "-lpthread"], check=True)
    link = folder / "libcuda.so"  # the name that Triton's linker looks for
    link.unlink(missing_ok=True)
    link.symlink_to(library.name)
    print(library)


def _needed() -> set[str]:
    """The names that torch's libraries import from CUDA, and those that Triton's driver calls."""
    imported = {name for library in LIBRARIES for name in _imports(SITE / "torch" / "lib" / library)}
    triton = (SITE / "triton" / "backends" / "nvidia" / "driver.c").read_text()
    called = set(re.findall(r"\b(cu[A-Z]\w+)\(", triton))
    return {name for name in imported | called | set(DRIVER.split()) if not KEPT.match(name)}


def _imports(library: Path) -> Iterable[str]:
    listed = ["nm", "--dynamic", "--undefined-only", str(library)]
    table = subprocess.run(listed, capture_output=True, text=True, check=True).stdout
    return re.findall(r"\bU ((?:__cuda|cuda|cublas|cudnn)[A-Z]\w*)", table)


def _written() -> set[str]:
    """The functions that the C files here define, by the names that the headers of CUDA give them."""
    names: set[str] = set()
    for source in SOURCES[1:]:
        folders = [f"-I{found}" for found in (HERE, *_headers())]
        text = subprocess.run(
            ["gcc", "-E", "-P", *folders, str(HERE / source)], capture_output=True, text=True, check=True
        )
        names |= set(re.findall(r"^(?:cudaError_t|CUresult|int|size_t) (\w+)\([^;{]*\) ?\{", text.stdout, re.MULTILINE))
    return names


def _functions(names: Iterable[str]) -> Iterator[str]:
    for name in names:
        if CREATES.fullmatch(name):
            yield f"int {name}(void **made) {{ return *made = new_handle(), 0; }}"
        else:
            yield f'int {name}(void) {{ return trace("{name}"), 0; }}'


def _headers() -> list[Path]:
    """The folders of CUDA's headers: those of the runtime that torch brought, and Triton's for the driver."""
    runtime = sorted((SITE / "nvidia").glob("cu1*/include")) or [SITE / "nvidia" / "cuda_runtime" / "include"]
    return [runtime[-1], SITE / "triton" / "backends" / "nvidia" / "include"]


if __name__ == "__main__":
    main()
