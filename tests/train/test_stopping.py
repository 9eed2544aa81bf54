"""Signals: what one asks for, and who hears of it."""

from __future__ import annotations

import signal

import pytest

from oqc.train import stopping
from oqc.train.stopping import stop_on_signals


def test_a_signal_that_is_sent_twice_at_once_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `timeout` does: to the process, then to its group."""
    with stop_on_signals() as stop:
        for _ in range(2):
            signal.raise_signal(signal.SIGTERM)
        assert stop.signal == signal.SIGTERM
        monkeypatch.setattr(stopping, "REPEAT", 0.0)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
    monkeypatch.undo()
    with stop_on_signals():
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
