"""The fa4gen command: click commands only; the work is done in codegen/, imported when a command runs so that --help stays quick.

Exit codes: 0 done; 1 the command's own verdict (a difference, a result out of bounds, hazards); 2 an error, one
line on stderr; 130 interrupted.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from . import __version__

if TYPE_CHECKING:
    from rich.console import Console

    from .codegen.config import Config

ARCHES = ("sm_90a", "sm_100a")
# Tables are this wide where output is no terminal and says no width.
PLAIN_WIDTH = 160

F = TypeVar("F", bound=Callable[..., Any])


@click.group(invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.version_option(__version__, package_name="fa4gen", message="%(prog)s %(version)s")
@click.pass_context
def cli(context: click.Context) -> None:
    """Generate, compile, run and check attention kernels specialised by a small YAML config."""
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


def _only(context: click.Context, parameter: click.Parameter, values: tuple[str, ...]) -> str | None:
    if len(values) > 1:
        raise click.BadParameter("given more than once; this command takes one", context, parameter)
    return values[0] if values else None


def _folder(context: click.Context, parameter: click.Parameter, value: str | None) -> Path | None:
    # Path("") is the current folder, which an empty variable in a script did not mean.
    if value == "":
        raise click.BadParameter("an empty path; give a folder, `.` for the current one", context, parameter)
    return None if value is None else Path(value)


def _config_option(required: bool, multiple: bool = False) -> Callable[[F], F]:
    text = "A config file, or the name of a shipped config (see `fa4gen list`)."
    if multiple:
        text += "  Repeatable." if required else "  Repeatable; default: all shipped."
    # Always repeatable for the parser: of a value given twice it would keep the last and drop the first without a word.
    name, callback = ("refs", None) if multiple else ("ref", _only)
    return click.option("--config", name, metavar="FILE|NAME", required=required, multiple=True, help=text, callback=callback)


def _arch_option(text: str) -> Callable[[F], F]:
    return click.option("--arch", type=click.Choice(ARCHES), help=text)


def _arch_list(context: click.Context, parameter: click.Parameter, value: str | None) -> tuple[str, ...] | None:
    if value is None:
        return None
    names = tuple(dict.fromkeys(name.strip() for name in value.split(",")))
    for name in names:
        if name not in ARCHES:
            raise click.BadParameter(f"{name!r} is not one of {', '.join(ARCHES)}", context, parameter)
    return names


def _console() -> Console:
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() or os.environ.get("COLUMNS") else PLAIN_WIDTH, highlight=False)


def _archs(config: Config, arch: str | None) -> tuple[str, ...]:
    from .codegen.geometry import derive

    if arch is None:
        return tuple(config.arch)
    derive(config, arch)
    return (arch,)


@cli.command()
@_config_option(required=True)
@_arch_option("Only this target; default: all the config lists.")
@click.option("--out", callback=_folder, help="Root of the generated tree; default: generated/ of the checkout, else ./generated.")
def emit(ref: str, arch: str | None, out: Path | None) -> None:
    """Generate and compile a config into OUT/<config>/<arch>/."""
    from .codegen import artifacts
    from .codegen.config import load_config

    config = load_config(ref)
    for path, tree in artifacts.emit(config, _archs(config, arch), out):
        click.echo(str(path))
        for module in tree.modules.values():
            for entry, kernel in sorted(module.kernels.items()):
                spills = f"{kernel.spill_store_bytes} + {kernel.spill_load_bytes} bytes spilled"
                click.echo(f"  {module.file_name}: {entry}: {kernel.registers} registers, {spills}")


@cli.command()
@_config_option(required=True, multiple=True)
@click.option("--arch", "archs", callback=_arch_list, metavar="A[,A]", help="Only these targets; default: all that each config lists.")
@click.option("--out", required=True, callback=_folder, metavar="DIR", help="A new folder, or one that holds an earlier export.")
def export(refs: tuple[str, ...], archs: tuple[str, ...] | None, out: Path) -> None:
    """Write CUBINs, a C header and launcher, and a manifest into DIR, for machines that have no compiler."""
    from .codegen import export as exporting
    from .codegen.config import load_config

    for name in exporting.export([load_config(ref) for ref in refs], archs, out):
        click.echo(str(out / name))


@cli.command()
@_config_option(required=False, multiple=True)
@click.option("--out", callback=_folder, help="Root of the generated tree, as for emit.")
@click.pass_context
def check(context: click.Context, refs: tuple[str, ...], out: Path | None) -> None:
    """Regenerate everything and compare it with the generated tree; exit 1 with the differences."""
    from .codegen import artifacts
    from .codegen.config import load_config, load_shipped, shipped_configs

    configs = [load_config(ref) for ref in refs] or [load_shipped(name) for name in shipped_configs()]
    result = artifacts.check(configs, out, whole=not refs)
    for note in result.notes:
        click.echo(note, err=True)
    if result.diff:
        click.echo(result.diff, nl=False)
        context.exit(1)


_COUNT = click.IntRange(min=1)


@cli.command()
@_config_option(required=True)
@click.option(
    "--backend", type=click.Choice(["auto", "cuda", "emulator"]), default="auto", help="auto: the GPU where its architecture matches."
)
@_arch_option("Only this target; default: all the config lists.")
@click.option("--batch", type=_COUNT, help="Sequences.")
@click.option("--q-len", type=_COUNT, help="Queries of a sequence.")
@click.option("--keys", type=_COUNT, help="Keys of a sequence; default 1,024.")
@click.option("--heads", type=_COUNT, help="Query heads.")
@click.option("--kv-heads", type=_COUNT, help="KV heads; a divisor of the query heads.")
@click.option("--seed", type=click.IntRange(min=0), default=0, help="Of the generated inputs.", show_default=True)
@click.option("--input", "input_path", type=click.Path(path_type=Path), help="Arrays q, k, v in an .npz or .safetensors file.")
@click.option("--save", "save_path", type=click.Path(path_type=Path), help="Write the outputs to this .npz file.")
@click.option("--update-golden", is_flag=True, help="Store the outputs as the new goldens, where they are within bounds.")
@click.option("--json", "as_json", is_flag=True, help="Print the rows and the findings as JSON instead of the table.")
def run(ref: str, **options: Any) -> int:
    """Run every unit kernel and the full kernel of a config against the references; exit 1 if anything is out of bounds."""
    from .codegen import runner

    return runner.run(runner.RunOptions(config=ref, **options))


@cli.command()
@_config_option(required=True)
@_arch_option("Only this target; default: all the config lists.")
@click.option("--svg", type=click.Path(path_type=Path), metavar="FILE", help="Draw what lies where to this file.")
@click.option("--trace", type=click.Path(path_type=Path), metavar="FILE.json", help="Emulate the attention kernel; write a Chrome trace.")
@click.option("--json", is_flag=True, help="Print JSON instead of tables.")
@click.option("--batch", type=_COUNT, help="Sequences of the traced run.")
@click.option("--q-len", type=_COUNT, help="Queries of a sequence.")
@click.option("--keys", type=_COUNT, help="Keys of a sequence; default 1,024.")
@click.option("--heads", type=_COUNT, help="Query heads.")
@click.option("--kv-heads", type=_COUNT, help="KV heads; a divisor of the query heads.")
@click.option("--seed", type=click.IntRange(min=0), default=0, help="Of the traced run's inputs and scheduler.", show_default=True)
def inspect(ref: str, **options: Any) -> int:
    """Show memory maps, the ring, barriers, registers and spills of a config's kernels, as tables, a picture or a trace."""
    from rich.console import Console

    from .codegen import inspection

    return inspection.run(inspection.InspectOptions(config=ref, **options), _console(), Console(stderr=True))


@cli.command()
@_config_option(required=False, multiple=True)
@click.option(
    "--cell", "cells", metavar="NAME=N,...", multiple=True, help="Such as depth=512,batch=16,keys=8192,q_len=1,heads=32,kv_heads=4."
)
@click.option(
    "--cells", "cells_ref", metavar="FILE|NAME", help="Cells of a YAML file, or decode, published, odd, features, models; default: decode."
)
@click.option("--out", callback=_folder, help="Folder of the JSON and the plot; default: bench/results of the checkout.")
@click.option("--peers", default="auto", show_default=True, help="auto: all that are installed; none; or names with commas.")
@click.option("--repeats", type=click.IntRange(min=3), default=40, show_default=True, help="Timed launches under each L2 flush.")
@click.option("--time-limit", type=click.FloatRange(min=0), metavar="SECONDS", help="Start no further cell after this long.")
@click.option("--show", type=click.Path(path_type=Path), metavar="JSON", help="Print an earlier run's report instead; with --out, plot it.")
def bench(refs: tuple[str, ...], **options: Any) -> int:
    """Measure the attention kernel on the GPU at hand against its own loads, the read ceiling and every installed peer."""
    from rich.console import Console

    from .codegen.bench import command

    return command.run(command.BenchOptions(configs=refs, **options), _console(), Console(stderr=True))


@cli.command()
@_config_option(required=True)
@click.option(
    "--cell", "cells", metavar="NAME=N,...", multiple=True, help="Such as depth=512,batch=16,keys=8192,q_len=1,heads=32,kv_heads=4."
)
@click.option(
    "--cells", "cells_ref", metavar="FILE|NAME", help="Cells of a YAML file, or decode, published, odd, features, models; default: decode."
)
@click.option("--field", "fields", multiple=True, metavar="NAME", help="Tune only this field.  Repeatable; default: all that are tuned.")
@click.option("--repeats", type=click.IntRange(min=3), default=15, show_default=True, help="Timed launches under each L2 flush.")
@click.option("--dry-run", is_flag=True, help="Print the table and leave the file as it is.")
def tune(ref: str, dry_run: bool, **options: Any) -> int:
    """Measure the legal geometry choices of a config on the GPU at hand and write the fastest back into its file."""
    from rich.console import Console

    from .codegen import tune as tuning

    return tuning.run(tuning.TuneOptions(config=ref, write=not dry_run, **options), _console(), Console(stderr=True))


@cli.command("list")
def list_configs() -> None:
    """Show the shipped configs with the figures of their geometry."""
    from rich.table import Table

    from .codegen.config import load_shipped, shipped_configs
    from .codegen.geometry import derive
    from .codegen.render import has_attention

    table = Table(box=None, pad_edge=False)
    for title in ("config", "mode"):
        table.add_column(title)
    for title in ("m_pack x rows", "depth"):
        table.add_column(title, justify="right")
    table.add_column("arch")
    for title in ("key tile", "ring slots", "TMEM columns", "SMEM bytes"):
        table.add_column(title, justify="right")
    table.add_column("attention.cu")
    for name in shipped_configs():
        config = load_shipped(name)
        for arch in config.arch:
            geo = derive(config, arch)
            table.add_row(
                name,
                "shared-key" if config.shared_key else "key-split",
                f"{config.m_pack} x {config.rows}",
                str(config.ov_depth),
                arch,
                str(geo.block_keys),
                str(geo.ring_slots),
                str(geo.tmem_columns) if geo.tmem_columns else "-",
                f"{geo.smem_bytes:,}",
                "yes" if has_attention(config, arch) else "not yet",
            )
    _console().print(table)


@cli.command()
@click.argument("file", metavar="FILE.ptx", type=click.Path(path_type=Path))
@click.option("--entry", metavar="NAME", help="The kernel to run; default: the only one in the file.")
@click.option("--grid", metavar="X[,Y[,Z]]", default="1", show_default=True)
@click.option("--block", metavar="X[,Y[,Z]]", default="128", show_default=True)
@click.option("--smem", type=click.IntRange(min=0), default=0, show_default=True, help="Bytes of dynamic shared memory.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of the scheduler.")
@click.option("--schedule", metavar="POLICY", default="random", show_default=True, help="round-robin, starve:WARPS or ahead:WARPS (4-7).")
@click.option("--budget", type=click.IntRange(min=1), help="Warp instructions before the run is given up; default: ten million.")
@click.option("--explore", type=click.IntRange(min=1), metavar="N", help="Every order of the synchronisation events, at most N; one CTA.")
@click.option("--region", "regions", multiple=True, metavar="NAME=OFFSET,BYTES[,NxM]", help="Name dynamic shared memory.  Repeatable.")
@click.option("--json", "as_json", is_flag=True, help="Print the findings as JSON on stdout.")
@click.option("--ignore", multiple=True, metavar="KIND", help="Hazards not to report.  Repeatable.")
@click.option("--arg", "args", multiple=True, metavar="SPEC", help="One for each parameter, in order.")
@click.option("--profile", is_flag=True, help="Print shared-memory wavefronts by PTX line, and bytes by engine.")
def emulate(file: Path, **options: Any) -> int:
    """Run an entry of any PTX file on the emulator; exit 1 if it reports hazards (on stderr).

    \b
    SPEC is one of
      in:FILE.npy                  an array that the kernel reads
      out:DTYPE[N,M]:FILE.npy      a new array, saved at the end
      inout:FILE.npy               read, and saved over itself
      u32:7  s64:-1  f32:0.5       a number
      bytes:00ff                   a by-value structure in hexadecimal
      tensormap:FILE.json          {"array": "in:x.npy", "box": [64, 64], "swizzle": 128}
    """
    from rich.console import Console

    from .codegen.emulator.command import run_command
    from .codegen.progress import emulation_progress

    with emulation_progress(Console(stderr=True)) as progress:
        return run_command(file, progress=progress(str(file)), **options)


@cli.command()
def schema() -> None:
    """Print the JSON Schema of a config file."""
    import json

    from .codegen.config import json_schema

    click.echo(json.dumps(json_schema(), indent=2))


def _fail(text: str) -> int:
    from .codegen.text import one_line

    click.echo(f"fa4gen: {one_line(text)}", err=True)
    return 2


def _run(arguments: Sequence[str] | None) -> int:
    try:
        # Not cli.main(): it has its own ideas of an interrupt and of a closed pipe.
        with cli.make_context("fa4gen", list(sys.argv[1:] if arguments is None else arguments)) as context:
            result = cli.invoke(context)
        sys.stdout.flush()
    except click.exceptions.Exit as exit_request:
        sys.stdout.flush()
        return exit_request.exit_code
    except click.UsageError as error:
        where = error.ctx.command_path if error.ctx else "fa4gen"
        return _fail(f"{error.format_message()} (see `{where} --help`)")
    except click.ClickException as error:
        return _fail(error.format_message())
    return result if isinstance(result, int) else 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line (default: the process's own) and returns its exit code. With FA4GEN_DEBUG set, errors keep their traceback."""
    # A closed descriptor leaves Python without the stream object: what is printed there goes nowhere, as it was asked to.
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115 - open as long as the process
    try:
        return _run(arguments)
    except (KeyboardInterrupt, click.Abort):
        return 130
    except BrokenPipeError:
        # Whoever read our output has left; keep the interpreter from complaining when it flushes.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except Exception as error:
        if os.environ.get("FA4GEN_DEBUG"):
            raise
        if isinstance(error, MemoryError):
            return _fail(f"not enough memory: {str(error) or 'ask for less at once'}")
        if isinstance(error, OSError):
            reason = error.strerror or str(error) or type(error).__name__
            return _fail(f"{error.filename}: {reason}" if error.filename else reason)
        if type(error).__module__.startswith("fa4gen."):
            return _fail(str(error))
        return _fail(f"internal error: {type(error).__name__}: {error} (FA4GEN_DEBUG=1 shows where)")


if __name__ == "__main__":
    sys.exit(main())
