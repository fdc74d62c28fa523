"""Runs loops one after the other, and writes each outcome as a line of JSON.

python -m tests.loops [NAME ...] [--of MODULE] [--options exact default] [--shares half third] [--timed]
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import warnings
from dataclasses import asdict

os.environ["MEMOPT_CACHE"] = "0"  # what an earlier run kept would be taken from disk

import torch

from tests.loops.runner import OPTIONS, SHARES, outcome, run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="without any, their names are listed")
    parser.add_argument("--of", default="tests.loops.all_loops", help="the module with LOOPS, by name")
    parser.add_argument("--options", nargs="+", choices=OPTIONS, default=list(OPTIONS))
    parser.add_argument("--shares", nargs="+", choices=SHARES, default=list(SHARES))
    parser.add_argument("--timed", action="store_true", help="run once more without a meter, for times")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    loops = importlib.import_module(arguments.of).LOOPS
    if not arguments.names:
        print(*loops, sep="\n")
    for name in arguments.names:
        plain = run(loops[name])
        for options in arguments.options:
            for share in arguments.shares:
                found = outcome(loops[name], plain, options, share, timed=arguments.timed)
                print(json.dumps({"title": loops[name].title, **asdict(found)}), flush=True)


if __name__ == "__main__":
    main()
