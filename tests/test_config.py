"""Configs: what loads, and that every refusal is one line naming file, key, value, rule and remedy."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import pytest
import yaml

from fa4gen.codegen import config as config_module
from fa4gen.codegen import geometry
from fa4gen.codegen.config import ConfigError, disabled_rules, load_config, load_shipped, parse_config, shipped_configs

SHARED_512 = {"name": "c", "ov_depth": 512, "shared_key": True}
SPLIT_128 = {"name": "c", "ov_depth": 128, "shared_key": False}
M2 = {"m_pack": 2, "rows": 64}
SM100 = {"arch": ["sm_100a"]}


def refuse(fields: object, source: str = "some.yaml") -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        parse_config(fields, source)
    error = caught.value
    text = str(error)
    assert len(text.splitlines()) == 1
    assert text.isprintable()
    assert text.startswith(f"{source}: ")
    assert f"[{error.rule}] " in text
    assert error.rule in geometry.all_rules()
    assert error.remedy
    assert text.endswith(error.remedy)
    return error


def test_shipped_configs_load_by_name_and_by_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert set(shipped_configs()) >= {"d64", "d128", "d128_m2", "d128_nofma", "d256", "d256_m2", "d512"}
    assert set(shipped_configs()) >= {"gemma4_global", "gemma_sliding", "gpt_oss", "llama3", "qwen3"}
    monkeypatch.chdir(tmp_path)
    for name in shipped_configs():
        config = load_config(name)
        assert config.name == name
        assert config == load_config(f"{name}.yaml") == load_shipped(name)
        assert config.arch == ("sm_90a", "sm_100a") or config.features()


def test_a_path_goes_before_a_shipped_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("d512.yaml").write_text("ov_depth: 256\nshared_key: true\n")
    assert load_config("d512.yaml").ov_depth == 256
    assert load_config("d512").ov_depth == 512
    assert load_shipped("d512").ov_depth == 512
    Path("d256").mkdir()  # a folder of that name, as in generated/, is no config
    assert load_config("d256").ov_depth == 256


def test_defaults() -> None:
    config = parse_config(SHARED_512)
    assert (config.m_pack, config.rows, config.use_fma, config.dtype, config.out_dtype, config.mask) == (
        4,
        32,
        True,
        "bfloat16",
        "bfloat16",
        "none",
    )
    assert config.arch == ("sm_90a", "sm_100a")
    assert hash(config) == hash(parse_config(SHARED_512))


def test_name_is_the_stem_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "my_kernel.yaml"
    path.write_text("ov_depth: 512\nshared_key: true\n")
    assert load_config(path).name == "my_kernel"
    path = tmp_path / "My kernel.yaml"
    path.write_text("ov_depth: 512\nshared_key: true\n")
    with pytest.raises(ConfigError, match=r"\[name\]"):
        load_config(path)


@pytest.mark.parametrize(
    ("changes", "rule", "key"),
    [
        ({"m_pak": 4}, "unknown-key", "m_pak"),
        ({1: 4}, "unknown-key", "1"),
        ({"rows": "32"}, "field-type", "rows"),
        ({"rows": 32.0}, "field-type", "rows"),
        ({"m_pack": True}, "field-type", "m_pack"),
        ({"shared_key": 1}, "field-type", "shared_key"),
        ({"shared_key": "yes"}, "field-type", "shared_key"),
        ({"use_fma": None}, "field-type", "use_fma"),
        ({"arch": "sm_90a"}, "field-type", "arch"),
        ({"arch": [90]}, "allowed-value", "arch"),
        ({"arch": ["sm_90"]}, "allowed-value", "arch"),
        ({"arch": []}, "arch-list", "arch"),
        ({"arch": ["sm_90a", "sm_90a"]}, "arch-list", "arch"),
        ({"ring_slots": 3.0}, "field-type", "ring_slots"),
        ({"ring_slots": 0}, "allowed-value", "ring_slots"),
        ({"group": True}, "field-type", "group"),
        ({"name": 5}, "field-type", "name"),
        ({"name": ""}, "name", "name"),
        ({"name": "../up"}, "name", "name"),
        ({"name": "a\nb"}, "name", "name"),
        ({"name": "x" * 65}, "name", "name"),
        ({"m_pack": 3}, "allowed-value", "m_pack"),
        ({"ov_depth": 96}, "allowed-value", "ov_depth"),
        ({"dtype": "float32"}, "allowed-value", "dtype"),
        ({"out_dtype": "bf16"}, "allowed-value", "out_dtype"),
        ({"mask": "casual"}, "allowed-value", "mask"),
        ({"warpgroups": 3}, "allowed-value", "warpgroups"),
        ({"warpgroups": False}, "field-type", "warpgroups"),
        ({"m_pack": 2}, "pack-fills-warpgroup", "rows"),
        ({"rows": 64}, "pack-fills-warpgroup", "rows"),
        ({"qk_depth": 256}, "equal-depths", "qk_depth"),
        ({"shared_key": False}, "key-split-depth", "ov_depth"),
        ({"tile_rows": 64}, "tile-rows", "tile_rows"),
        ({"tile_rows": 12}, "tile-rows", "tile_rows"),
        ({"group": 0}, "group", "group"),
        ({"page_list": True}, "page-size", "page_list"),
        ({"page_list": True, "kv_layout": "paged", "page_size": 16}, "page-list-lengths", "page_list"),
        ({"kv_dtype": "float8"}, "allowed-value", "kv_dtype"),
        ({"kv_dtype": "float8_e4m3fn", "kv_layout": "paged", "page_size": 1, "arch": ["sm_100a"]}, "fp8-copy-rows", "page_size"),
        ({"kv_scale": "page"}, "kv-scale", "kv_scale"),
        ({"kv_scale": "page", "kv_dtype": "float8_e4m3fn"}, "kv-scale", "kv_scale"),
        ({"kv_scale": "page", "kv_layout": "paged", "page_size": 16}, "kv-scale", "kv_scale"),
        ({"group": -6}, "group", "group"),
        ({"group": 1025}, "group", "group"),
        ({"group": 10**30}, "group", "group"),
        ({"allow_spills": ["unit combine"]}, "spill-names", "allow_spills"),
        ({"allow_spills": ["k", "k"]}, "spill-names", "allow_spills"),
        (SM100 | {"block_keys": 96}, "block-keys", "block_keys"),
        (SM100 | {"block_keys": 512}, "block-keys", "block_keys"),
        (SM100 | M2, "tmem-columns", "ov_depth"),
        (SM100 | {"ring_slots": 5}, "smem-bytes", "ring_slots"),
        (SM100 | {"ring_slots": 1}, "epilogue-arena", "ring_slots"),
    ],
)
def test_refusals(changes: dict[object, object], rule: str, key: str) -> None:
    fields: dict[object, object] = {**SHARED_512, **changes}
    error = refuse(fields)
    assert (error.rule, error.key) == (rule, key)


def test_the_line_reads_as_promised() -> None:
    assert str(refuse(SHARED_512 | {"rows": 64})) == (
        "some.yaml: rows = 64: [pack-fills-warpgroup] m_pack * rows = 128: a warpgroup's threads map one to one onto rows and parts; "
        "with m_pack 4, rows is 32"
    )
    assert str(refuse(SHARED_512 | {"m_pack": "4"})) == (
        "some.yaml: m_pack = '4': [field-type] a value has the type of its field; give an integer"
    )


def test_key_split_refusals() -> None:
    assert refuse(SPLIT_128 | SM100 | {"ring_slots": 4}).rule == "epilogue-arena"
    # Two V sub-tiles of a depth 128 tile are held at once; the arena asks for more.
    assert refuse(SPLIT_128 | SM100 | {"ring_slots": 1}).rule == "ring-floor"
    assert refuse(SPLIT_128 | SM100 | M2 | {"ring_slots": 5}).rule == "epilogue-arena"
    assert refuse(SPLIT_128 | SM100 | M2 | {"ring_slots": 7}).rule == "smem-bytes"
    assert refuse(SPLIT_128 | SM100 | {"block_keys": 64}).rule == "key-chunk-steps"


def test_hints() -> None:
    assert refuse(SHARED_512 | {"m_pak": 4}).remedy == "did you mean m_pack?"
    assert refuse(SHARED_512 | {"mask": "casual"}).remedy == "did you mean causal?"
    assert refuse(SHARED_512 | {"rows": 16}).remedy == "use 32 or 64"
    assert refuse({"name": "c", "ov_depth": 512}).key == "shared_key"
    # A misspelt key is reported as such, not as the missing one.
    assert refuse({"name": "c", "ov_dept": 512, "shared_key": True}).key == "ov_dept"
    with pytest.raises(ConfigError, match="did you mean d512"):
        load_config("d51")


def test_values_are_shown_on_one_line_and_short() -> None:
    loop: list[object] = []
    loop.append(loop)
    for value in ["a\nb\u2028\x1b[31m", "x" * 10_000, 10**6000, loop, {"a": loop}, [1] * 1000, b"\0", float("nan"), object()]:
        assert len(str(refuse(SHARED_512 | {"rows": value}))) < 400


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("", "mapping"),
        ("- 1\n- 2\n", "mapping"),
        ("just text", "mapping"),
        ("ov_depth: 512\nov_depth: 256\nshared_key: true\n", "duplicate-key"),
        ("ov_depth: [512\n", "yaml-syntax"),
        ("ov_depth: 512\n\tshared_key: true\n", "yaml-syntax"),
        ("ov_depth: 512\n---\nshared_key: true\n", "yaml-syntax"),
        ("ov_depth: 2020-13-45\n", "yaml-syntax"),
        ("ov_depth: " + "9" * 5000, "yaml-syntax"),
        ("? [a, b]\n: 1\n", "yaml-syntax"),
        ("ov_depth: !!python/object:os.system x\n", "yaml-syntax"),
        ("ov_depth: *nowhere\n", "yaml-syntax"),
        ("a: " + "[" * 5000, "yaml-syntax"),
        ("ov_depth: 512\nname: \x07\n", "yaml-syntax"),
        ("a: &a [*a]\n", "yaml-syntax"),
        ("ov_depth: &a [1, 1]\nrows: [*a, *a, *a]\nshared_key: true\n", "field-type"),
        ("#" * 70_000, "file-size"),
    ],
)
def test_malformed_files(tmp_path: Path, text: str, rule: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert caught.value.rule == rule
    assert len(str(caught.value).splitlines()) == 1
    assert str(caught.value).startswith(str(path))


def test_unreadable_files(tmp_path: Path) -> None:
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"ov_depth: \xff\xfe\x00")
    fifo = tmp_path / "fifo.yaml"
    os.mkfifo(fifo)
    link = tmp_path / "loop.yaml"
    link.symlink_to(link)
    for ref in (binary, fifo, link, tmp_path, tmp_path / "none.yaml", "x" * 5000, "a\0b", "", "/dev/zero"):
        with pytest.raises(ConfigError) as caught:
            load_config(ref)
        assert caught.value.rule in ("readable-file", "yaml-syntax"), ref
        assert len(str(caught.value).splitlines()) == 1


def test_byte_order_mark_is_no_part_of_the_config(tmp_path: Path) -> None:
    path = tmp_path / "bom.yaml"
    path.write_bytes(b"\xef\xbb\xbfov_depth: 512\nshared_key: true\n")
    assert load_config(path).ov_depth == 512


def test_rules_have_ids_and_sentences() -> None:
    rules = geometry.all_rules()
    assert set(config_module.RULES) <= set(rules)
    for rule, sentence in rules.items():
        assert rule == rule.lower()
        assert " " not in rule
        assert len(sentence.split()) > 3, rule


def test_a_rule_can_be_switched_off_and_comes_back() -> None:
    too_deep = SPLIT_128 | SM100 | M2 | {"ov_depth": 256, "warpgroups": 1}
    assert refuse(too_deep).rule == "key-split-depth"
    with disabled_rules("key-split-depth"):
        assert parse_config(too_deep).ov_depth == 256
        other_thread: list[str] = []
        thread = threading.Thread(target=lambda: other_thread.append(refuse(too_deep).rule))
        thread.start()
        thread.join()
        assert other_thread == ["key-split-depth"]
    assert refuse(too_deep).rule == "key-split-depth"
    with pytest.raises(KeyError), disabled_rules("no-such-rule"):
        pass


def test_schema_describes_the_shipped_files() -> None:
    schema = json.loads(json.dumps(config_module.json_schema()))
    assert schema["required"] == ["ov_depth", "shared_key"]
    assert schema["additionalProperties"] is False
    assert schema["properties"]["m_pack"]["enum"] == [2, 4]
    folder = Path(config_module.__file__).parent.parent / "configs"
    for path in folder.glob("*.yaml"):
        assert set(yaml.safe_load(path.read_text())) <= set(schema["properties"])


def test_config_round_trips_through_json() -> None:
    config = parse_config(SHARED_512 | {"tile_rows": 16, "allow_spills": ["k"]})
    assert parse_config(json.loads(json.dumps(config.model_dump(mode="json")))) == config


def test_a_refusal_by_one_of_several_targets_names_it() -> None:
    fields = {"name": "x", "ov_depth": 512, "shared_key": True, "ring_slots": 5}
    with pytest.raises(ConfigError, match=r"on sm_100a .*leave sm_100a out of arch") as refused:
        parse_config(fields)
    assert refused.value.rule == "smem-bytes"
    with pytest.raises(ConfigError) as alone:
        parse_config(fields | {"arch": ["sm_100a"]})
    assert "sm_100a" not in str(alone.value)
    assert parse_config(fields | {"arch": ["sm_90a"]}).ring_slots == 5
