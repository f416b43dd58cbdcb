"""The YAML config: its fields, its defaults, and every rule that a legal one satisfies.

A rule has an id and a sentence in `RULES`; a refusal names the id. Rules that need only the fields themselves are checked here, rules about
tiles, rings and memory maps by the `derive` functions in geometry.py, through the same `require`. Loading a config runs both.
"""

from __future__ import annotations

import difflib
import math
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic_core import PydanticCustomError

from .text import one_line as one_line

Arch = Literal["sm_90a", "sm_100a"]
ARCHES: tuple[Arch, ...] = ("sm_90a", "sm_100a")
WARPGROUP_THREADS = 128
KEY_SPLIT_DEPTH_LIMIT = 128
MAX_CONFIG_BYTES = 64 * 1024
MAX_GROUP = 1024
MAX_WINDOW = 1 << 24
PAGE_SIZES = (1, 16, 32, 64, 128, 256)

# Rule id -> the sentence a refusal prints. geometry_sm90 adds the rules that only its kernels have (geometry.all_rules() lists them all).
RULES: dict[str, str] = {
    "readable-file": "a config is a readable file, or the name of a shipped config",
    "file-size": f"a config file has at most {MAX_CONFIG_BYTES:,} bytes",
    "yaml-syntax": "a config is one YAML document",
    "mapping": "a config is a mapping of field names to values",
    "duplicate-key": "a field is given once",
    "unknown-key": "a config has no fields but its own",
    "missing-key": "a field without a default is given",
    "field-type": "a value has the type of its field",
    "allowed-value": "a value is one of those its field allows",
    "name": "name is 1 to 64 lower-case letters, digits and underscores: it becomes a folder",
    "arch-list": "arch lists at least one target, each once",
    "arch-enabled": "only the targets that a config lists can be generated from it",
    "spill-names": "allow_spills lists names of kernel entries, each once",
    "pack-fills-warpgroup": "m_pack * rows = 128: a warpgroup's threads map one to one onto rows and parts",
    "equal-depths": "qk_depth equals ov_depth: K and V sub-tiles share one ring",
    "key-split-depth": f"key-split holds the full depth of O in every part, which fits up to depth "
    f"{KEY_SPLIT_DEPTH_LIMIT}: deeper ones have no MMA, no room or no registers",
    "tile-rows": "tile_rows is 8, 16, 32 or rows, and at most rows",
    "split": "split is auto (the fastest partitions of the keys for a launch) or fixed N (partitions of N keys, whatever the batch)",
    "split-key-tiles": "a fixed partition is a whole number of key tiles",
    "group": f"group is 1 to {MAX_GROUP:,}",
    "page-size": f"page_size goes with kv_layout paged, and is one of {', '.join(map(str, PAGE_SIZES))}",
    "page-list-lengths": "a list of pages does not say where its sequence ends: it needs key_lengths",
    "window-causal": "a window ends at the query's own position: it needs mask causal",
    "softcap": "softcap is a positive, finite number",
    "kv-scale": "scales of pages go with kv_dtype and kv_layout paged",
    "feature-target": "a feature is generated for the targets that have it",
    "block-keys": "block_keys (BN) is the N of a .ws MMA: 64, 128 or 256",
    "tmem-columns": "S and O of all softmax warpgroups fit 512 TMEM columns",
    "smem-bytes": "shared memory is at most 232,448 bytes",
    "ring-floor": "the ring has as many slots as the schedule holds at once: fewer hang",
    "epilogue-arena": "the epilogue staging fits the dead span of Q, ring and P",
    "key-chunk-divides": "block_keys per part is a multiple of the keys of one P.V MMA",
    "key-chunk-steps": "the keys of a V sub-tile are whole MMAs of 16; in key-split with m_pack 4, for each of the two stages of P",
    "ring-walk": "producer and consumer walk equally many ring positions per V tile",
    "sub-tile-bytes": "K and V sub-tiles are byte-equal: they share one ring",
}

_disabled: ContextVar[frozenset[str]] = ContextVar("disabled_rules", default=frozenset())


class ConfigError(ValueError):
    """A refused config. `str()` is one line: source, key, value, [rule id], the rule, and what would satisfy it.

    rule: a key of `RULES` (or of the rules a target adds). key: the field, or None when the file as a whole is refused.
    """

    def __init__(self, rule: str, sentence: str, *, key: str | None, value: object, remedy: str, source: str = "<config>") -> None:
        self.rule, self.sentence, self.key, self.value, self.remedy, self.source = rule, sentence, key, value, remedy, source
        where = f"{source}: " if key is None else f"{source}: {key} = {_shown(value)}: "
        super().__init__(one_line(f"{where}[{rule}] {sentence}; {remedy}"))

    def on_target(self, arch: str) -> ConfigError:
        """The same refusal, naming the target whose limits it speaks of."""
        remedy = f"{self.remedy}, or leave {arch} out of arch"
        return ConfigError(self.rule, f"on {arch} {self.sentence}", key=self.key, value=self.value, remedy=remedy, source=self.source)

    def with_source(self, source: str) -> ConfigError:
        """The same refusal, naming the file it came from."""
        return ConfigError(self.rule, self.sentence, key=self.key, value=self.value, remedy=self.remedy, source=source)


class _Given:
    """Stands for a value that a message only describes."""

    def __init__(self, how: str) -> None:
        self.how = how

    def __repr__(self) -> str:
        return f"({self.how})"


_ABSENT = _Given("not given")


def _shown(value: object, limit: int = 60) -> str:
    """A value as a config would write it, shortened. Never expands a nested or self-referring value (YAML aliases can make huge ones)."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if value is None:
        return "null"
    if isinstance(value, int):
        return str(value) if value.bit_length() < 200 else "(a very large integer)"
    if isinstance(value, str):
        text = value if len(value) <= limit else value[:limit] + "..."
        return text if re.fullmatch(r"[A-Za-z_][\w.-]*", text) else repr(text)
    if isinstance(value, (list, tuple)):
        items = [_shown(item, 20) if not isinstance(item, (list, tuple, dict, set)) else "..." for item in list(value)[:4]]
        return "[" + ", ".join(items + (["..."] if len(value) > 4 else [])) + "]"
    if isinstance(value, (dict, set)):
        return "{...}"
    text = repr(value)
    return text if len(text) <= limit else text[:limit] + "..."


def register_rules(rules: Mapping[str, str]) -> None:
    """Adds a target's own rules (id -> sentence) to `RULES`; an id keeps one meaning."""
    for rule, sentence in rules.items():
        if RULES.setdefault(rule, sentence) != sentence:
            raise AssertionError(f"rule {rule} has two meanings")


def switched_off() -> frozenset[str]:
    """Ids of the rules that are switched off here and now."""
    return _disabled.get()


@contextmanager
def disabled_rules(*rules: str) -> Iterator[None]:
    """Switches rules off within the block: only to show what they prevent. An unknown id is a KeyError."""
    for rule in rules:
        RULES[rule]
    token = _disabled.set(_disabled.get() | set(rules))
    try:
        yield
    finally:
        _disabled.reset(token)


def require(ok: bool, rule: str, key: str, value: object, remedy: str, detail: str = "") -> None:
    """Raises ConfigError for `key` = `value` unless `ok`. `remedy` says what would satisfy the rule, `detail` the numbers that broke it."""
    if not ok and rule not in _disabled.get():
        raise ConfigError(rule, RULES[rule] + (f" ({detail})" if detail else ""), key=key, value=value, remedy=remedy)


def _plain_int(value: object) -> object:
    # Literal compares with ==, which 4.0 and True would pass.
    if type(value) is not int:
        raise PydanticCustomError("int_type", "an integer")
    return value


def _plain_list(value: object) -> object:
    if not isinstance(value, (list, tuple)):
        raise PydanticCustomError("list_type", "a list")
    return tuple(value)


def _distinct(values: tuple[str, ...]) -> bool:
    return len(set(values)) == len(values)


Positive = Annotated[int, Field(gt=0)]


class Config(BaseModel):
    """One kernel specialisation. Sizes are in elements; a derived field left out (None) is computed by geometry.derive for each target."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    name: str = Field(description="file stem and folder of the generated tree; default: the stem of the config's file")
    m_pack: Annotated[Literal[2, 4], BeforeValidator(_plain_int)] = Field(4, description="parts a warpgroup's 128 threads split into")
    rows: Annotated[Literal[32, 64], BeforeValidator(_plain_int)] = Field(32, description="query rows of a tile; m_pack * rows = 128")
    ov_depth: Annotated[Literal[64, 128, 256, 512], BeforeValidator(_plain_int)] = Field(description="head dim of V and O")
    shared_key: bool = Field(description="true: parts are depth bands of one O; false: parts are independent key partitions")
    use_fma: bool = Field(True, description="scale folded into the exponent's FMA; false: scores are scaled first")
    arch: Annotated[tuple[Arch, ...], BeforeValidator(_plain_list)] = Field(ARCHES, description="targets to generate for")
    dtype: Literal["bfloat16", "float16"] = Field("bfloat16", description="type of Q, K, V and P")
    out_dtype: Literal["bfloat16", "float16", "float32"] = Field("bfloat16", description="type of O")
    mask: Literal["none", "causal"] = Field("none", description="causal: query i sees keys <= keys - q_len + i")
    qk_depth: int | None = Field(None, description="head dim of Q and K; derived: ov_depth")
    block_keys: Positive | None = Field(None, description="BN, keys of a key tile; derived from the accumulators' space")
    ring_slots: Positive | None = Field(
        None,
        description="K/V ring slots; derived: as many as shared memory holds; with kv_dtype on sm_100a those that the MMAs read, and the "
        "copies' 8-bit slots have the rest",
    )
    warpgroups: Annotated[Literal[1, 2] | None, BeforeValidator(lambda v: v if v is None else _plain_int(v))] = Field(
        None, description="softmax warpgroups, each with its own key tiles and accumulators; derived: 2"
    )
    ctas_per_sm: Annotated[Literal[1, 2, 3, 4] | None, BeforeValidator(lambda v: v if v is None else _plain_int(v))] = Field(
        None,
        description="sm_90a shared-key: CTAs that share an SM, its shared memory and registers, so that one computes while another waits; "
        "derived: as many as measure fastest and never spill",
    )
    tile_rows: Positive | None = Field(None, description="rows of a tile that carry queries, the rest is padding; derived: rows")
    rescale: Literal["eager", "lazy", "exact"] = Field(
        "lazy",
        description="sm_90a shared-key: exchange row maxima every key tile, or only when a row outgrew the last agreed maximum; exact "
        "(on sm_100a too): lazy for each row by itself, so that no bit of a row depends on when the other rows of its tile ask for it",
    )
    kv_layout: Literal["contiguous", "paged"] = Field(
        "contiguous", description="paged: K and V are pages of page_size keys, which a block table on the device lists for each sequence"
    )
    page_size: Annotated[int | None, BeforeValidator(lambda v: v if v is None else _plain_int(v))] = Field(
        None, description="keys of a page: 1, 16, 32, 64, 128 or 256"
    )
    key_lengths: bool = Field(False, description="the keys of each sequence are read on the device (seqused_k)")
    ragged_queries: bool = Field(
        False, description="queries of all sequences lie end to end, their starts are read on the device (cu_seqlens_q)"
    )
    window: Positive | None = Field(None, description="keys that a query sees at most, its own position the last of them")
    softcap: float | None = Field(None, description="scores become softcap * tanh(scale * score / softcap)")
    sinks: bool = Field(False, description="each query head has a logit of its own that takes part in the softmax without a value")
    page_list: bool = Field(
        False, description="paged: the block table lists chosen pages, whose places in the sequence are given beside it"
    )
    kv_dtype: Literal["float8_e4m3fn"] | None = Field(
        None, description="type of K and V where it is not dtype; scales restore them, and they, Q and P are multiplied as float16"
    )
    kv_scale: Literal["head", "page"] = Field(
        "head", description="with kv_dtype: what has a scale of K and one of V, each KV head, or each page of each KV head"
    )
    split: str | None = Field(
        None,
        description="partitions of the keys: auto, the fastest for a launch; fixed N, N keys each: a sequence gives the same bits in any "
        "batch; default: the launch says",
    )
    group: int | None = Field(None, description="query heads per KV head, when fixed; else a launch argument")
    allow_spills: Annotated[tuple[str, ...], BeforeValidator(_plain_list)] = Field((), description="kernel entries that may spill")

    def features(self) -> tuple[str, ...]:
        """What this config asks of a kernel beyond contiguous K and V of equal lengths: off, a feature leaves no trace in the source."""
        asked = {
            "paged": self.kv_layout == "paged",
            "key_lengths": self.key_lengths,
            "ragged_queries": self.ragged_queries,
            "window": self.window is not None,
            "softcap": self.softcap is not None,
            "sinks": self.sinks,
            "page_list": self.page_list,
            "kv_dtype": self.kv_dtype is not None,
            "exact": self.rescale == "exact",
        }
        return tuple(name for name, on in asked.items() if on)

    def check(self) -> None:
        """Raises ConfigError for the first rule broken by the fields alone."""
        legal_name = re.fullmatch(r"[a-z0-9_]{1,64}", self.name) is not None
        require(legal_name, "name", "name", self.name, "rename it, or give a legal `name` in the file")
        require(_distinct(self.arch) and len(self.arch) > 0, "arch-list", "arch", self.arch, f"use a subset of {_shown(ARCHES)}")
        entries = all(re.fullmatch(r"[A-Za-z_]\w{0,127}", entry, re.ASCII) for entry in self.allow_spills)
        remedy = "name kernel entries such as unit_combine"
        require(entries and _distinct(self.allow_spills), "spill-names", "allow_spills", self.allow_spills, remedy)
        remedy = f"with m_pack {self.m_pack}, rows is {WARPGROUP_THREADS // self.m_pack}"
        require(self.m_pack * self.rows == WARPGROUP_THREADS, "pack-fills-warpgroup", "rows", self.rows, remedy)
        remedy = f"set qk_depth to {self.ov_depth} or leave it out"
        require(self.qk_depth in (None, self.ov_depth), "equal-depths", "qk_depth", self.qk_depth, remedy)
        remedy = f"set shared_key: true, or ov_depth at most {KEY_SPLIT_DEPTH_LIMIT}"
        require(self.shared_key or self.ov_depth <= KEY_SPLIT_DEPTH_LIMIT, "key-split-depth", "ov_depth", self.ov_depth, remedy)
        tiles = [choice for choice in (8, 16, 32, 64) if choice <= self.rows]
        remedy = f"use one of {', '.join(map(str, tiles))}"
        require(self.tile_rows is None or self.tile_rows in tiles, "tile-rows", "tile_rows", self.tile_rows, remedy)
        remedy = "use auto, or fixed and a number of keys, such as fixed 1024"
        legal = self.split is None or re.fullmatch(r"auto|fixed [1-9][0-9]{0,8}", self.split) is not None
        require(legal, "split", "split", self.split, remedy)
        paged = self.kv_layout == "paged"
        remedy = "use one of them" if paged else "leave it out, or set kv_layout: paged"
        require(self.page_size in PAGE_SIZES if paged else self.page_size is None, "page-size", "page_size", self.page_size, remedy)
        require(paged or not self.page_list, "page-size", "page_list", self.page_list, "set kv_layout: paged and a page_size")
        require(self.key_lengths or not self.page_list, "page-list-lengths", "page_list", self.page_list, "set key_lengths: true")
        require(self.window is None or self.mask == "causal", "window-causal", "window", self.window, "set mask: causal")
        cap = self.softcap
        legal = self.window is None or self.window <= MAX_WINDOW
        require(legal, "window-causal", "window", self.window, f"give at most {MAX_WINDOW:,}")
        require(cap is None or (math.isfinite(cap) and cap > 0), "softcap", "softcap", cap, "use a number such as 50.0, or leave it out")
        legal = self.kv_scale == "head" or (paged and self.kv_dtype is not None)
        require(legal, "kv-scale", "kv_scale", self.kv_scale, "set both, or leave kv_scale out")
        remedy = "give a group in that range, or leave it out for a launch argument"
        require(self.group is None or 1 <= self.group <= MAX_GROUP, "group", "group", self.group, remedy)


def require_features(config: Config, arch: str, supported: frozenset[str], remedy: str = "") -> None:
    """Raises ConfigError for a feature that the kernel for `arch` does not have. remedy: what else than another target would do."""
    for feature in config.features():
        other = f"{remedy or 'leave it out'}, or list a target other than {arch}"
        require(feature in supported, "feature-target", feature, True, other, f"{arch} lacks it")


def fixed_keys(split: str) -> int | None:
    """Keys of a partition of a legal `split`; None for auto."""
    return None if split == "auto" else int(split.removeprefix("fixed "))


_TYPE_NAMES = {
    "int_type": "an integer",
    "bool_type": "true or false",
    "string_type": "a string",
    "list_type": "a list",
    "tuple_type": "a list",
}


def _refusal(error: ValidationError, mapping: Mapping[str, Any]) -> ConfigError:
    """The first of pydantic's findings as one of our lines; an unknown key first, since a misspelt one is also missing."""
    findings = error.errors(include_url=False)
    finding = next((f for f in findings if f["type"] == "extra_forbidden"), findings[0])
    key = str(finding["loc"][0])
    value = mapping.get(key, _ABSENT)
    kind = finding["type"]
    if kind == "extra_forbidden":
        close = difflib.get_close_matches(key, Config.model_fields, n=1)
        remedy = f"did you mean {close[0]}?" if close else f"fields are {', '.join(Config.model_fields)}"
        return ConfigError("unknown-key", RULES["unknown-key"], key=key[:80], value=value, remedy=remedy)
    if kind == "missing":
        remedy = f"give {key}: {Config.model_fields[key].description}"
        return ConfigError("missing-key", RULES["missing-key"], key=key, value=_ABSENT, remedy=remedy)
    if len(finding["loc"]) > 1 and isinstance(finding["loc"][1], int):
        value = finding["input"]
    if kind in _TYPE_NAMES:
        return ConfigError("field-type", RULES["field-type"], key=key, value=value, remedy=f"give {_TYPE_NAMES[kind]}")
    context = finding.get("ctx", {})
    if kind == "literal_error":
        allowed = str(context["expected"]).replace("'", "")
        close = difflib.get_close_matches(str(value), re.split(r", | or ", allowed), n=1) if isinstance(value, str) else []
        remedy = f"did you mean {close[0]}?" if close else f"use {allowed}"
    elif kind == "greater_than":
        remedy = f"give at least {int(context['gt']) + 1}"
    else:
        remedy = finding["msg"]
    return ConfigError("allowed-value", RULES["allowed-value"], key=key, value=value, remedy=remedy)


def parse_config(mapping: object, source: str = "<config>") -> Config:
    """A checked Config from a mapping of field names to values.

    source: named in refusals; its stem is the config's name unless the mapping has one. Raises ConfigError for every broken rule,
    those of the derived geometry of each listed target included.
    """
    from . import geometry

    try:
        if not isinstance(mapping, Mapping):
            found = "nothing" if mapping is None else f"a {type(mapping).__name__}"
            raise ConfigError(
                "mapping", f"{RULES['mapping']}, not {found}", key=None, value=None, remedy="write lines such as `ov_depth: 512`"
            )
        fields = {(key if isinstance(key, str) else _shown(key)): value for key, value in mapping.items()}
        if "name" not in fields and source != "<config>":
            fields["name"] = Path(source).stem
        try:
            config = Config.model_validate(fields)
        except ValidationError as error:
            raise _refusal(error, fields) from None
        config.check()
        for arch in config.arch:
            geometry.derive(config, arch)
    except ConfigError as error:
        raise error.with_source(source) from None
    return config


class _Loader(yaml.SafeLoader):
    """SafeLoader that refuses a key given twice instead of taking the last."""


def _construct_mapping(loader: _Loader, node: yaml.MappingNode) -> dict[object, object]:
    seen: set[object] = set()
    for key_node, _ in node.value:
        if key_node.tag == "tag:yaml.org,2002:merge" or not isinstance(key_node, yaml.ScalarNode):
            continue
        key = loader.construct_object(key_node)
        if key in seen:
            remedy = f"remove the one on line {key_node.start_mark.line + 1}"
            raise ConfigError("duplicate-key", RULES["duplicate-key"], key=_shown(key), value=_Given("given twice"), remedy=remedy)
        seen.add(key)
    loader.flatten_mapping(node)
    return dict(loader.construct_pairs(node, deep=True))


_Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _construct_mapping)


def _parse_yaml(text: str) -> object:
    def refused(what: str, line: int | None = None) -> ConfigError:
        at = f", line {line}" if line is not None else ""
        return ConfigError("yaml-syntax", f"{RULES['yaml-syntax']} ({what}{at})", key=None, value=None, remedy="correct the file")

    try:
        return yaml.load(text, Loader=_Loader)
    except ConfigError:
        raise
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise refused(error.problem or error.context or "not YAML", mark.line + 1 if mark else None) from None
    except yaml.YAMLError as error:
        raise refused(str(error).splitlines()[0]) from None
    except RecursionError:
        raise refused("nested too deeply") from None
    except (ValueError, TypeError, OverflowError) as error:  # a scalar that only looks like a date or a number; an unhashable key
        raise refused(str(error)) from None


def _unreadable(source: str, why: str, rule: str = "readable-file", remedy: str = "") -> ConfigError:
    remedy = remedy or f"give a path, or one of {', '.join(shipped_configs())}"
    return ConfigError(rule, f"{RULES[rule]} ({why})", key=None, value=None, remedy=remedy, source=source)


@cache
def shipped_configs() -> tuple[str, ...]:
    """Names of the configs that come with the package, sorted."""
    folder = resources.files("fa4gen.configs")
    return tuple(sorted(entry.name.removesuffix(".yaml") for entry in folder.iterdir() if entry.name.endswith(".yaml")))


def load_shipped(name: str) -> Config:
    """The shipped config of that name, whatever files the current folder has. Raises KeyError for an unknown name."""
    if name not in shipped_configs():
        raise KeyError(name)
    source = f"{name}.yaml"
    return _load_bytes(resources.files("fa4gen.configs").joinpath(source).read_bytes(), source)


def load_config(ref: str | os.PathLike[str]) -> Config:
    """Loads and checks a config: a path first, then the name of a shipped config with or without `.yaml`.

    Raises ConfigError (one line) for every failure, unreadable and malformed files included.
    """
    source = os.fspath(ref)
    path = Path(source)
    name = source.removesuffix(".yaml")
    try:
        exists, is_file = path.exists(), path.is_file()
    except (OSError, ValueError) as error:  # a name the file system refuses
        raise _unreadable(source, getattr(error, "strerror", None) or str(error)) from None
    try:
        if is_file:
            with path.open("rb") as file:
                data = file.read(MAX_CONFIG_BYTES + 1)
        elif name in shipped_configs():
            return load_shipped(name)
        elif exists:
            raise _unreadable(source, "not a regular file")
        else:
            close = difflib.get_close_matches(name, shipped_configs(), n=1)
            raise _unreadable(source, "no such file", remedy=f"did you mean {close[0]}?" if close else "")
    except OSError as error:
        raise _unreadable(source, error.strerror or type(error).__name__) from None
    return _load_bytes(data, source)


def _load_bytes(data: bytes, source: str) -> Config:
    if len(data) > MAX_CONFIG_BYTES:
        raise _unreadable(source, "this one has more", "file-size", "remove what is not a field")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise _unreadable(source, f"not UTF-8 at byte {error.start}", "yaml-syntax", "save it as UTF-8 text") from None
    try:
        mapping = _parse_yaml(text)
    except ConfigError as error:
        raise error.with_source(source) from None
    return parse_config(mapping, source)


def json_schema() -> dict[str, Any]:
    """The JSON Schema (draft 2020-12) of a config file, where `name` may be left out."""
    schema = Config.model_json_schema()
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    schema["required"] = [key for key in schema["required"] if key != "name"]
    return schema
