"""Config and geometry -> source text, through Jinja. Nothing depends on time, hash order or machine: equal inputs give equal bytes."""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import PurePosixPath
from typing import Any

import jinja2

from .config import Config
from .geometry import OUT_CTYPES, derive, entry_configs, functions, symbol
from .text import one_line

HEADER_TEMPLATE = "functions/header.cuh.j2"
UNIT_TEMPLATE = "unit/unit.cu.j2"
# By target and shared_key.
ATTENTION_TEMPLATES = {
    ("sm_90a", True): "kernels/attention_sm90a.cu.j2",
    ("sm_90a", False): "kernels/attention_sm90a_ks.cu.j2",
    ("sm_100a", True): "kernels/attention_sm100a.cu.j2",
    ("sm_100a", False): "kernels/attention_sm100a.cu.j2",
}


class RenderError(ValueError):
    """A template that does not render. `str()` is one line naming the template and its line."""


@dataclass(frozen=True)
class Rendered:
    """One output file: its text, the template that makes it, and every template that went into it (paths under templates/)."""

    text: str
    template: str
    templates: tuple[str, ...]


class _Loader(jinja2.BaseLoader):
    """Loads from the package's templates and remembers which were asked for."""

    def __init__(self) -> None:
        self.package = jinja2.PackageLoader("fa4gen", "templates")
        self.loaded: set[str] = set()

    def get_source(self, environment: jinja2.Environment, template: str) -> tuple[str, str | None, Callable[[], bool] | None]:
        found = self.package.get_source(environment, template)
        self.loaded.add(template)
        # The template's own name instead of its path: errors name it, and no machine path can reach a message.
        return found[0], template, found[2]


def template_source(name: str) -> str:
    """The text of a template, by its path under templates/."""
    environment = jinja2.Environment()
    return jinja2.PackageLoader("fa4gen", "templates").get_source(environment, name)[0]


def has_attention(config: Config, arch: str) -> bool:
    """Whether the full kernel of `config` is generated for `arch`: always, except on sm_90a in shared-key with m_pack 2."""
    return arch == "sm_100a" or not config.shared_key or config.m_pack == 4


def targets(config: Config, arch: str) -> dict[str, tuple[str, bool, str | None]]:
    """Output file -> (template, whether it is a header, the function it holds), in the order they are made."""
    files: dict[str, tuple[str, bool, str | None]] = {}
    for function in functions(config):
        files[f"{function}.cuh"] = (f"functions/{function}.cuh.j2", True, function)
    files["unit.cu"] = (UNIT_TEMPLATE, False, None)
    if has_attention(config, arch):
        files["attention.cu"] = (ATTENTION_TEMPLATES[arch, config.shared_key], False, None)
    return files


def _tidy(text: str) -> str:
    lines = [line.rstrip() for line in text.splitlines()]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip("\n") + "\n"


def _banner(config: Config, arch: str, template: str, title: str) -> str:
    return "\n".join(
        [
            f"// {title}",
            "//",
            f"// Generated from templates/{template} for config {config.name} on {arch}.",
            "// Do not edit: change the template or the config, then run",
            f"//     fa4gen emit --config {config.name}.yaml",
        ]
    )


def _template_line(error: BaseException, default: str) -> str:
    """`template:line` of the innermost template frame of a traceback; Jinja rewrites frames to the template's own lines."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename.endswith(".j2")]
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else default


def _environment(loader: _Loader) -> jinja2.Environment:
    return jinja2.Environment(
        loader=loader, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True, autoescape=False
    )


def _rendered(environment: jinja2.Environment, name: str, template: str, context: Mapping[str, Any]) -> str:
    """The text of the template `name`; errors name `template` where they name none themselves. Raises RenderError."""
    try:
        text = environment.get_template(name).render(context)
    except jinja2.TemplateSyntaxError as error:
        raise RenderError(one_line(f"templates/{error.name or template}:{error.lineno}: {error.message}")) from None
    except jinja2.TemplateNotFound as error:
        raise RenderError(one_line(f"templates/{_template_line(error, template)}: there is no templates/{error.message}")) from None
    except Exception as error:
        # Whatever an expression in a template raises is that template's mistake.
        raise RenderError(one_line(f"templates/{_template_line(error, template)}: {type(error).__name__}: {error}")) from error
    return _tidy(text)


def render_text(template: str, context: Mapping[str, Any]) -> str:
    """A template that belongs to no one config, by its path under templates/. Raises RenderError."""
    return _rendered(_environment(_Loader()), template, template, context)


def _tiles(config: Config, arch: str) -> list[dict[str, Any]]:
    """Of each entry its geometry, its name and that of the struct with its constants; `sharing`: one of the same rows came before."""
    tiles: list[dict[str, Any]] = []
    for entry in entry_configs(config, arch):
        geo = derive(entry, arch)
        sharing = any(tile["geo"].tile_rows == geo.tile_rows for tile in tiles)
        tiles.append(
            {"geo": geo, "symbol": symbol(entry, arch), "name": f"Tile{geo.tile_rows}{'Shared' if sharing else ''}", "sharing": sharing}
        )
    return tiles


def _render_file(config: Config, arch: str, template: str, header: bool, function: str | None, *, stream: bool = False) -> Rendered:
    loader = _Loader()
    environment = _environment(loader)
    used: set[str] = set()

    def use(*names: str, **parameters: Any) -> str:
        """Pieces that this file does not have yet: `name` is templates/ptx/<name>.cuh.j2, `folder/name` templates/<folder/name>.

        A piece is one per name and parameters; the pieces that it uses itself come out before it.
        """
        texts = []
        for name in names:
            key = "_".join([re.sub(r"[^A-Za-z0-9]", "_", name), *(str(value) for _, value in sorted(parameters.items()))])
            if key in used:
                continue
            used.add(key)
            path = f"{name}.j2" if "/" in name else f"ptx/{name}.cuh.j2"
            text = environment.get_template(path).render(context | parameters).strip("\n")
            if header:
                # Several headers may be included together, each carries the wrappers it needs.
                guard = f"FA4_{key.upper()}"
                text = f"#ifndef {guard}\n#define {guard}\n{text}\n#endif  // {guard}"
            texts.append(text)
        return "\n\n".join(texts) + "\n" if texts else ""

    context: dict[str, Any] = {
        "config": config,
        "geo": derive(config, arch),
        "arch": arch,
        "sm90": arch == "sm_90a",
        "sm100": arch == "sm_100a",
        "header": header,
        "function": function,
        "stream": stream,
        "symbol": symbol(config, arch),
        # The entries of attention.cu, which differ in the rows of their tiles.
        "tiles": _tiles(config, arch),
        # Without FMA scores are scaled before their maxima are taken: softcap needs them so.
        "use_fma": config.use_fma and config.softcap is None and config.kv_scale == "head",
        "out_ctype": OUT_CTYPES[config.out_dtype],
        "use": use,
        "banner": lambda title: _banner(config, arch, template, title),
    }
    text = _rendered(environment, HEADER_TEMPLATE if header else template, template, context)
    return Rendered(text, template, tuple(sorted(loader.loaded)))


@lru_cache(maxsize=256)
def render_files(config: Config, arch: str) -> dict[str, Rendered]:
    """The source files of one config and target, with the templates each came from. Raises ConfigError, RenderError."""
    return {name: _render_file(config, arch, *target) for name, target in targets(config, arch).items()}


def render(config: Config, arch: str) -> dict[str, str]:
    """File name -> text of the source files of one config and target. Raises ConfigError, RenderError."""
    return {name: rendered.text for name, rendered in render_files(config, arch).items()}


@lru_cache(maxsize=64)
def render_stream(config: Config, arch: str) -> str:
    """attention.cu without its arithmetic: the same entry, arguments and loads, to measure what the loads alone take.

    Equal to attention.cu where the template has no such variant. Raises ConfigError, RenderError, KeyError where there is no attention.cu.
    """
    return _render_file(config, arch, *targets(config, arch)["attention.cu"], stream=True).text


def folder(config: Config, arch: str) -> PurePosixPath:
    """Where the files lie in a generated tree: <config>/<arch>."""
    return PurePosixPath(config.name) / arch
