"""The bar that commands show while a model is loaded or converted."""

import sys

from kvferry.cli.support.terminal import Terminal
from kvferry.engines.mini.models.progress import Progress, ProgressState, set_progress_display

__all__ = ["show_loading"]


def show_loading() -> None:
    """From now on shows the progress of loading a model as a bar on the terminal; without a terminal the log has it."""
    terminal = Terminal(sys.stderr)
    bar = terminal.bar()
    if bar is None:
        return

    def display(progress: Progress) -> None:
        bar.update(progress.title, progress.num_bytes, progress.total_bytes)
        if progress.state is not ProgressState.RUNNING:
            bar.end()
        if progress.state is ProgressState.DONE:
            terminal.line((f"  {progress}", "dim"))

    set_progress_display(display)
