"""The first moment of the `oqc` command. It stands outside the package, whose import takes PyTorch's second or two: a
Ctrl-C meanwhile ends it at once and quietly, not with a traceback through PyTorch."""

from __future__ import annotations

import os
import signal


def main() -> None:
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:  # not where it is ignored, as in the background of a script
        signal.signal(signal.SIGINT, lambda *_: os._exit(128 + signal.SIGINT))
    from oqc.cli import main as run

    signal.signal(signal.SIGINT, before)
    run()
