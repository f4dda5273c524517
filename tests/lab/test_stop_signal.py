"""Being told to stop, by real signals to real processes: what is heard when, and which way a process leaves."""

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.lab.tiny_run import ROOT

BEGIN = """
import atexit, os, sys, time
from param_decomp_lab.processes.stop_signal import StopSignal
from tests.lab.child import stuck

def say(text):
    print(text, flush=True)
"""
"""`stuck` stands for XLA compiling: the main thread is in native code, and runs no handler."""


@contextmanager
def started(script: str) -> Iterator["subprocess.Popen[str]"]:
    process = subprocess.Popen(
        [sys.executable, "-c", BEGIN + script],
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT), "CHILD_NUMBER": "0", "PATH": ""},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def line(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    return process.stdout.readline().rstrip("\n")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_leaves_at_once_while_nothing_is_new(number: signal.Signals) -> None:
    """Though the main thread never comes back."""
    script = """
stop = StopSignal()
stop.hint = "go on"
with stop.listening():
    stop.may_leave("while compiling; there was nothing to save", patience=0.5)
    stuck()
"""
    with started(script) as process:
        assert line(process) == "stuck"
        sent = time.monotonic()
        process.send_signal(number)
        assert line(process) == "stopped while compiling; there was nothing to save; go on"
        assert process.wait(60) == 75
        assert time.monotonic() - sent >= 0.5


def test_stays_while_there_is_something_to_save() -> None:
    """The main thread is waited for however long it takes, and then it leaves in order."""
    script = """
stop = StopSignal()
with stop.listening():
    stop.may_leave("at step 0", patience=0.2)
    stop.must_save()
    say("computing")
    end = time.monotonic() + 2
    while time.monotonic() < end:
        sum(range(1000))
    say(f"saves: {stop()}")
    stop.may_leave("and saved", patience=30)
    time.sleep(0.5)
say("left in order")
"""
    with started(script) as process:
        assert line(process) == "computing"
        process.send_signal(signal.SIGTERM)
        assert line(process) == "saves: True"
        assert line(process) == "left in order"
        assert process.wait(60) == 0


@pytest.mark.slow
def test_told_before_there_was_a_step() -> None:
    """A signal is not forgotten when it comes before the first look, and the state is saved by then."""
    script = """
stop = StopSignal()
with stop.listening():
    say("starting")
    time.sleep(1)
    stop.must_save()
    time.sleep(6)
    say(f"looks: {stop()}")
"""
    with started(script) as process:
        assert line(process) == "starting"
        process.send_signal(signal.SIGTERM)
        assert line(process) == "looks: True"
        assert process.wait(60) == 0


def test_the_second_interrupt_interrupts() -> None:
    script = """
stop = StopSignal()
try:
    with stop.listening():
        stop.must_save()
        say("begun")
        while not stop():
            time.sleep(0.01)
        say("told")
        time.sleep(30)
except KeyboardInterrupt:
    say("interrupted")
"""
    with started(script) as process:
        assert line(process) == "begun"
        process.send_signal(signal.SIGINT)
        assert line(process) == "told"
        process.send_signal(signal.SIGTERM)  # no more than another reminder
        # Linux gives a signal to another thread while the main one has one to handle, and its sleep then goes on.
        time.sleep(0.3)
        process.send_signal(signal.SIGINT)
        assert line(process) == "interrupted"
        assert process.wait(60) == 0


def test_nothing_is_heard_any_more_when_all_is_done() -> None:
    """What is left is Python's own end: a signal there must not make a failure of a run that is finished."""
    script = """
atexit.register(time.sleep, 1.5)
atexit.register(say, "ending")
with StopSignal().listening():
    pass
"""
    with started(script) as process:
        assert line(process) == "ending"
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0


def test_handlers_are_given_back() -> None:
    script = """
import signal
with StopSignal().listening() as stop:
    assert stop.is_listening
    os.kill(os.getpid(), signal.SIGTERM)
    stop.must_save()
    assert stop()
assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
assert signal.set_wakeup_fd(-1) == -1
say("ready")
time.sleep(30)
"""
    with started(script) as process:
        assert line(process) == "ready"
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == -signal.SIGTERM
