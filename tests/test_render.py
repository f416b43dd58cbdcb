"""Rendering: the same bytes every time, readable files, wrappers once a file, and template mistakes named by template and line."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable

import jinja2
import pytest

from fa4gen.codegen import render as render_module
from fa4gen.codegen.compiler import compile_source
from fa4gen.codegen.config import ARCHES, Config, ConfigError, load_shipped, parse_config, shipped_configs
from fa4gen.codegen.render import RenderError, has_attention, render, render_files, targets, template_source

DIGEST = """
import hashlib
from fa4gen.codegen.config import load_shipped, shipped_configs
from fa4gen.codegen.render import render
digest = hashlib.sha256()
for name in shipped_configs():
    config = load_shipped(name)
    for arch in config.arch:
        for file, text in render(config, arch).items():
            digest.update(f"{name}/{arch}/{file}\\n{text}".encode())
print(digest.hexdigest())
"""


def every_file() -> list[tuple[str, str, str]]:
    configs = [load_shipped(name) for name in shipped_configs()]
    return [(config.name, arch, file) for config in configs for arch in config.arch for file in targets(config, arch)]


def test_the_same_bytes_under_any_hash_seed() -> None:
    digests = {
        subprocess.run(
            [sys.executable, "-c", DIGEST], env=os.environ | {"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        ).stdout
        for seed in ("0", "1", "12345")
    }
    assert len(digests) == 1
    assert len(digests.pop().strip()) == 64


@pytest.mark.parametrize(("name", "arch", "file"), every_file())
def test_every_file_is_tidy_and_says_where_it_comes_from(name: str, arch: str, file: str) -> None:
    rendered = render_files(load_shipped(name), arch)[file]
    text = rendered.text
    assert text.endswith("\n")
    assert not text.endswith("\n\n")
    assert not text.startswith("\n")
    assert not [line for line in text.splitlines() if line != line.rstrip()]
    assert "\n\n\n" not in text
    assert "{{" not in text
    assert "{% " not in text
    banner = "\n".join(text.splitlines()[:12])
    for word in (f"templates/{rendered.template}", name, arch, "Do not edit", f"fa4gen emit --config {name}.yaml"):
        assert word in banner
    assert rendered.template in rendered.templates
    for template in rendered.templates:
        assert template_source(template)


@pytest.mark.parametrize(("name", "arch", "file"), every_file())
def test_wrappers_come_once_and_guarded_in_headers(name: str, arch: str, file: str) -> None:
    config = load_shipped(name)
    rendered = render_files(config, arch)[file]
    wrappers = [template for template in rendered.templates if template.startswith("ptx/")]
    # By its parameters too: a kernel for several tiles has a wrapper for each size of a fragment.
    defined = re.findall(r"^__device__ __forceinline__ \S+ (ptx_\w+\(.*)$", rendered.text, re.MULTILINE)
    assert len(defined) == len(set(defined)) >= len(wrappers)
    guards = re.findall(r"^#ifndef (FA4_\w+)$", rendered.text, re.MULTILINE)
    if file.endswith(".cuh"):
        assert "#pragma once" in rendered.text
        assert len(guards) == len(set(guards)) >= len(wrappers)
    else:
        assert not guards
        assert "#include" not in rendered.text


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("name", ["d512", "d128"])
def test_headers_can_be_used_alone_and_together(name: str, arch: str) -> None:
    headers = [text for file, text in render(load_shipped(name), arch).items() if file.endswith(".cuh")]
    for text in [*headers, "\n".join(headers)]:
        compile_source(text.replace("#pragma once", "") + '\nextern "C" __global__ void nothing() {}\n', arch, "headers.cu")


ALL_MASKS = {"mask": "causal", "window": 90, "sinks": True, "softcap": 20.0, "kv_layout": "paged", "page_size": 16, "key_lengths": True}
FP8_PAGES = {"kv_dtype": "float8_e4m3fn", "kv_layout": "paged", "page_size": 16, "kv_scale": "page", "rescale": "exact"}
# dtype, out_dtype, and what decides which parts of a kernel are there: types decide how they convert.
TYPES_AND_PARTS: list[tuple[str, str, dict[str, object]]] = [
    ("bfloat16", "float16", {}),
    ("float16", "float32", {}),
    ("bfloat16", "float16", {"key_lengths": True}),
    ("float16", "bfloat16", {"key_lengths": True}),
    ("float16", "bfloat16", ALL_MASKS),
    ("bfloat16", "float32", ALL_MASKS),
    ("bfloat16", "bfloat16", FP8_PAGES),
    ("float16", "float32", FP8_PAGES),
]


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize(("shared_key", "m_pack"), [(True, 4), (True, 2), (False, 4), (False, 2)])
def test_a_kernel_has_the_wrappers_that_it_uses_and_no_others(arch: str, shared_key: bool, m_pack: int) -> None:
    """Whatever the types and features: a wrapper that one of them needs may not come from another."""
    seen = 0
    for dtype, out_dtype, parts in TYPES_AND_PARTS:
        fields = {"shared_key": shared_key, "m_pack": m_pack, "rows": 128 // m_pack, "dtype": dtype, "out_dtype": out_dtype}
        try:
            config = parse_config({"name": "types", "arch": [arch], "ov_depth": 128} | fields | parts)
        except ConfigError as error:
            if error.rule != "feature-target":
                raise
            continue
        for file, text in render(config, arch).items():
            if not file.endswith(".cu"):
                continue
            code = re.sub(r"//.*", "", text)
            defined = set(re.findall(r"__forceinline__ [\w ]+?\b(ptx_\w+)\(", code))
            used = {name for name in re.findall(r"\b(ptx_\w+)", code) if name not in defined or len(re.findall(rf"\b{name}\b", code)) > 1}
            assert used == defined, (file, fields, parts)
            seen += 1
    assert seen >= 2


def test_files_of_the_modes() -> None:
    assert list(render(load_shipped("d512"), "sm_90a")) == ["exchange4.cuh", "level0.cuh", "unit.cu", "attention.cu"]
    assert list(render(load_shipped("d512"), "sm_100a")) == ["exchange4.cuh", "level0.cuh", "unit.cu", "attention.cu"]
    assert list(render(load_shipped("d128"), "sm_90a")) == ["combine.cuh", "unit.cu", "attention.cu"]
    assert list(render(load_shipped("d256_m2"), "sm_90a")) == ["exchange4.cuh", "level0.cuh", "unit.cu"]


@pytest.mark.parametrize("name", shipped_configs())
def test_where_the_full_kernel_is_generated(name: str) -> None:
    config = load_shipped(name)
    assert [arch for arch in config.arch if not has_attention(config, arch)] == (["sm_90a"] if name == "d256_m2" else [])


Replace = Callable[[str, str], None]


@pytest.fixture
def replace(monkeypatch: pytest.MonkeyPatch) -> Replace:
    """Replaces one template's text for this test."""
    original = render_module._Loader.get_source

    def with_text(name: str, text: str) -> None:
        def get_source(self: render_module._Loader, environment: jinja2.Environment, template: str) -> tuple[str, str | None, None]:
            return (text, name, None) if template == name else (original(self, environment, template)[0], template, None)

        monkeypatch.setattr(render_module._Loader, "get_source", get_source)

    return with_text


def fresh(name: str) -> Config:
    """A config no other test has rendered: render() remembers its results."""
    return parse_config({"name": name, "ov_depth": 512, "shared_key": True, "arch": ["sm_100a"]})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("// one\n// two {{ geo.no_such_number }}\n", r"unit/unit\.cu\.j2:2: UndefinedError: .*no_such_number"),
        ("// one\n\n{% if %}\n", r"unit/unit\.cu\.j2:3: "),
        ("// one\n{{ use('no_such_wrapper') }}\n", r"unit/unit\.cu\.j2:2: there is no templates/ptx/no_such_wrapper"),
        ("{{ 1 // 0 }}\n", r"unit/unit\.cu\.j2:1: ZeroDivisionError"),
    ],
)
def test_template_mistakes_name_template_and_line(replace: Replace, text: str, message: str) -> None:
    replace("unit/unit.cu.j2", text)
    with pytest.raises(RenderError, match=message) as caught:
        render(fresh("mistake"), "sm_100a")
    assert len(str(caught.value).splitlines()) == 1


def test_a_mistake_in_a_wrapper_names_the_wrapper(replace: Replace) -> None:
    replace("ptx/bar_sync.cuh.j2", "\n\n{{ nothing_like_it }}\n")
    with pytest.raises(RenderError, match=r"ptx/bar_sync\.cuh\.j2:3: .*nothing_like_it"):
        render(fresh("wrapper"), "sm_100a")


def test_output_is_tidied(replace: Replace) -> None:
    replace("unit/unit.cu.j2", "\n\n// a   \n\n\n\n// b\n{{ use('bar_sync') }}\n{{ use('bar_sync') }}\n\n\n")
    text = render(fresh("tidy"), "sm_100a")["unit.cu"]
    assert text.startswith("// a\n\n// b\n")
    assert text.count("bar.sync") == template_source("ptx/bar_sync.cuh.j2").count("bar.sync")
    assert text.endswith("}\n")
