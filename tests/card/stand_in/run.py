"""Runs a Python program with the stand-in for a CUDA card, which is built at its first use.

    .venv-card/bin/python tests/card/stand_in/run.py -m pytest -m card
    MEMOPT_CARD="NVIDIA A100,40960,8.0,108" .venv-card/bin/python tests/card/stand_in/run.py -m benchmarks.card_bytes

Where there is a driver of a real card, the program runs on that card.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
FOLDER = Path(sys.prefix) / "card"
REAL_CARD = Path("/dev/nvidiactl")


def main() -> None:
    """Replace this process by `python ARGUMENTS`, with the stand-in in place of CUDA's libraries."""
    if not REAL_CARD.exists():
        os.environ.update(_environment(_built()))
    os.execv(sys.executable, [sys.executable, *sys.argv[1:]])


def _built() -> Path:
    """The library, rebuilt where its sources are newer."""
    library = FOLDER / "libcuda.so.1"
    newest = max(source.stat().st_mtime for source in (*HERE.glob("*.[ch]"), HERE / "build.py"))
    if not library.exists() or library.stat().st_mtime < newest:
        subprocess.run([sys.executable, str(HERE / "build.py"), str(FOLDER)], check=True, stdout=sys.stderr)
    return library


def _environment(library: Path) -> dict[str, str]:
    """Variables that put the library before CUDA's, and keep apart what is compiled and planned with it."""
    return {
        "LD_PRELOAD": str(library),
        "LD_LIBRARY_PATH": str(FOLDER),
        "TRITON_LIBCUDA_PATH": str(FOLDER),
        "TRITON_CACHE_DIR": str(FOLDER / "triton"),
        "TORCHINDUCTOR_CACHE_DIR": str(FOLDER / "inductor"),
        "TORCHINDUCTOR_COMPILE_THREADS": "1",  # a pool of processes would not be worth its start
        "MEMOPT_CACHE_DIR": os.environ.get("MEMOPT_CACHE_DIR", str(FOLDER / "plans")),
    }


if __name__ == "__main__":
    main()
