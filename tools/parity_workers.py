"""Runs in each of the two processes that `parity.two_processes` starts: the columns that need them, as JSON.

A worker that waits for too long ends itself. So nothing is left running, also where the process that started it is gone.
"""

import faulthandler
import json
import os
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import parity_probes
import torch
import torch.distributed

LIMIT_S = 240


def main(out: str) -> None:
    probes = parity_probes.TWO_PROCESSES
    found = in_a_group(lambda: {name: parity_probes.column(probe) for name, probe in probes.items()})
    if found:
        Path(out).write_text(json.dumps(found), encoding="utf-8")


def in_a_group(observe: Callable, limit_s: float = LIMIT_S) -> dict | None:
    """What both processes have observed alike; the first of them gets it."""
    faulthandler.dump_traceback_later(limit_s, exit=True)
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", timeout=timedelta(seconds=limit_s))
    try:
        both: list = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(both, observe())
        if any(found != both[0] for found in both):
            raise RuntimeError(f"the processes do not agree: {both}")
        return both[0] if torch.distributed.get_rank() == 0 else None
    finally:
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
    # Python's own end now and then aborts the process while threads of gloo are still running.
    os._exit(0)
