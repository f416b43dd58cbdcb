"""What a person sees while a long emulation runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console


@contextmanager
def emulation_progress(errors: Console) -> Iterator[Callable[[str], Callable[[int], None]]]:
    """A line on stderr that shows a long emulation is alive; nothing where stderr is no terminal."""
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}"), TextColumn("{task.completed:,} warp instructions"), TimeElapsedColumn())
    with Progress(*columns, console=errors, transient=True, disable=not errors.is_terminal) as bar:

        def task(label: str) -> Callable[[int], None]:
            for other in bar.task_ids:
                bar.remove_task(other)
            current = bar.add_task(label, total=None)
            return lambda instructions: bar.update(current, completed=instructions)

        yield task
