"""PTX text to a module of entries, variables and instructions with resolved registers and labels.

The grammar is that of PTX ISA 9.1 chapters 4 and 5 as far as compilers and inline assembly use it: nested scopes that redeclare
registers and labels, parametrised register names, initialised variables. Instructions are kept as opcode text and operands; what they
mean is the business of the instruction tables. Every error names the line.
"""

from __future__ import annotations

import math
import re
import struct
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from .hazards import Hazard

MAX_MESSAGE = 300
"""Characters of an error, which may quote names of any length."""


class PtxError(ValueError):
    """PTX that cannot be parsed or executed: one line, with the PTX line number where there is one."""

    def __init__(self, message: str, line: int = 0) -> None:
        if len(message) > MAX_MESSAGE:
            message = message[:MAX_MESSAGE] + "..."
        super().__init__(f"PTX line {line}: {message}" if line else message)
        self.line = line
        self.hazards: list[Hazard] = []
        """What the checks had found when a launch was given up."""


class PtxFault(ValueError):
    """What PTX asks for cannot be done: one line, to which whoever decodes or executes the instruction adds where (PtxError).

    Only this is taken for a fault of the PTX; any other exception inside an instruction is a defect of the emulator, and stays one.
    """


class Words(list[str]):
    """Modifiers of an opcode: one that is missing is a fault of the PTX."""

    def __getitem__(self, place: Any) -> Any:
        try:
            found = super().__getitem__(place)
        except IndexError:
            raise PtxFault("a modifier is missing") from None
        return Words(found) if isinstance(place, slice) else found


class Operands(tuple["Operand", ...]):
    """Operands of an instruction: one that is missing is a fault of the PTX."""

    def __getitem__(self, place: Any) -> Any:
        try:
            return super().__getitem__(place)
        except IndexError:
            raise PtxFault(f"there are only {len(self)} operands") from None


class Choices(dict[str, Any]):
    """What a modifier may be: one that is not among the keys is a fault of the PTX."""

    def __missing__(self, key: str) -> Any:
        raise PtxFault(f".{key} is not supported here")


TYPE_BYTES = {
    "pred": 1, "b8": 1, "u8": 1, "s8": 1, "b16": 2, "u16": 2, "s16": 2, "f16": 2, "bf16": 2, "b32": 4, "u32": 4, "s32": 4, "f32": 4,
    "f16x2": 4, "bf16x2": 4, "b64": 8, "u64": 8, "s64": 8, "f64": 8, "f32x2": 8, "b128": 16,
}  # fmt: skip


@dataclass(frozen=True, eq=False)
class Register:
    name: str
    type: str
    index: int
    """Number of the register within its storage class (predicate, 16, 32, 64 bits) of the entry."""

    @property
    def bytes(self) -> int:
        """Size of the value in bytes; 1 for predicates."""
        return TYPE_BYTES[self.type]


@dataclass(frozen=True)
class Immediate:
    value: int
    """The integer as written, or the bits of a floating-point literal."""
    kind: str = "int"
    """int, f32 or f64: how the literal was written."""


@dataclass(frozen=True)
class Symbol:
    name: str
    offset: int = 0


@dataclass(frozen=True)
class Special:
    name: str
    """Special register such as %tid.x."""


@dataclass(frozen=True)
class Negated:
    operand: Register
    """A source predicate written !%p."""


@dataclass(frozen=True)
class Address:
    base: Register | Symbol | Immediate
    offset: int = 0
    coordinates: tuple[Operand, ...] = ()
    """The {x, y, ...} of a tensor address."""


@dataclass(frozen=True)
class Vector:
    items: tuple[Operand, ...]


@dataclass(frozen=True)
class Pair:
    first: Operand
    """The d|p form: a destination and its predicate."""
    second: Operand


@dataclass(frozen=True)
class Sink:
    """The operand `_`."""


Operand = Register | Immediate | Symbol | Special | Negated | Address | Vector | Pair | Sink


@dataclass
class Instruction:
    line: int
    opcode: str
    operands: tuple[Operand, ...]
    guard: Register | None = None
    guard_negated: bool = False
    target: int = -1
    """Index of the instruction that a branch goes to."""
    label: str = ""
    targets: tuple[int, ...] = ()
    source: str = ""
    """file:line that a .loc directive says, file without its folders."""


@dataclass
class Variable:
    name: str
    space: str
    type: str
    align: int
    size: int
    """Bytes; 0 for an extern array of unknown size."""
    line: int
    extern: bool = False
    data: bytes | None = None
    references: tuple[tuple[int, str, int], ...] = ()
    """(byte position, symbol, offset) of initialisers that are addresses."""


@dataclass(frozen=True)
class Parameter:
    name: str
    size: int
    align: int
    offset: int


@dataclass
class Entry:
    """A kernel: its parameters, launch bounds and instructions."""

    name: str
    line: int
    params: tuple[Parameter, ...] = ()
    maxntid: tuple[int, int, int] | None = None
    reqntid: tuple[int, int, int] | None = None
    cluster: tuple[int, int, int] | None = None
    """.reqnctapercluster"""
    max_cluster: int | None = None
    """.maxclusterrank"""
    instructions: list[Instruction] = field(default_factory=list)
    variables: dict[str, Variable] = field(default_factory=dict)
    register_counts: dict[int, int] = field(default_factory=dict)
    """Storage class in bits (1, 16, 32, 64, 128) to number of registers."""
    is_function: bool = False

    @property
    def param_bytes(self) -> int:
        return max((p.offset + p.size for p in self.params), default=0)


@dataclass
class Module:
    version: str
    target: str
    entries: dict[str, Entry]
    variables: dict[str, Variable]


_TOKEN = re.compile(
    r"""(?P<space>[ \t\r]+|//[^\n]*|/\*.*?\*/)
    |(?P<newline>\n)
    |(?P<string>"(?:[^"\\\n]|\\.)*")
    |(?P<number>0[fF][0-9a-fA-F]{8}\b|0[dD][0-9a-fA-F]{16}\b|0[xX][0-9a-fA-F]+U?|0[bB][01]+U?|(?:\d+\.\d*(?:[eE][+-]?\d+)?|\d+[eE][+-]?\d+)|\d+U?)
    |(?P<word>[A-Za-z_$%.][A-Za-z0-9_$.%]*(?:::[A-Za-z0-9_$.%]+)*)
    |(?P<sign>[-+{}()\[\],;:@!|<>=~*/&^])""",
    re.VERBOSE | re.DOTALL,
)
_SPECIAL = re.compile(
    r"%(?:(?:tid|ntid|ctaid|nctaid|clusterid|nclusterid|cluster_ctaid|cluster_nctaid)\.[xyzw]|laneid|warpid|nwarpid|smid|nsmid|gridid|"
    r"is_explicit_cluster|cluster_ctarank|cluster_nctarank|lanemask_(?:eq|le|lt|ge|gt)|clock|clock64|clock_hi|globaltimer|globaltimer_lo|"
    r"globaltimer_hi|total_smem_size|aggr_smem_size|dynamic_smem_size|envreg\d+|pm\d+|current_graph_exec|reserved_smem_offset_\w+)$"
)
_LINKAGE = (".visible", ".extern", ".weak", ".common")
_SPACES = (".global", ".shared", ".const", ".local", ".param")
_BRANCHES = ("bra", "brx")


def _tokenize(text: str) -> tuple[list[str], list[int]]:
    tokens: list[str] = []
    lines: list[int] = []
    line, position, size = 1, 0, len(text)
    match_at = _TOKEN.match
    while position < size:
        match = match_at(text, position)
        if match is None:
            raise PtxError(f"unexpected character {text[position]!r}", line)
        kind = match.lastgroup
        if kind == "newline":
            line += 1
        elif kind == "space":
            line += match.group().count("\n")
        else:
            tokens.append(match.group())
            lines.append(line)
        position = match.end()
    return tokens, lines


class _Scope:
    def __init__(self, parent: _Scope | None) -> None:
        self.parent = parent
        self.registers: dict[str, Register] = {}
        self.ranges: dict[str, tuple[str, int]] = {}
        self.labels: dict[str, int] = {}
        self.variables: dict[str, str] = {}
        self.tables: dict[str, tuple[str, ...]] = {}


class _Parser:
    def __init__(self, text: str) -> None:
        self.tokens, self.lines = _tokenize(text)
        self.position = 0
        self.module = Module("", "", {}, {})
        self.entry: Entry | None = None
        self.scope = _Scope(None)
        self.branches: list[tuple[Instruction, _Scope]] = []
        self.unique = 0
        self.files: dict[str, str] = {}
        self.source: tuple[str, str] | None = None
        """(file number, line) of the last .loc."""
        self.located: list[tuple[Instruction, tuple[str, str]]] = []

    # ------------------------------------------------------------------------------------------------------- token access

    @property
    def line(self) -> int:
        return self.lines[min(self.position, len(self.lines) - 1)] if self.lines else 0

    def peek(self) -> str:
        return self.tokens[self.position] if self.position < len(self.tokens) else ""

    def next(self) -> str:
        if self.position >= len(self.tokens):
            raise PtxError("the text ends in the middle of a statement", self.line)
        token = self.tokens[self.position]
        self.position += 1
        return token

    def expect(self, token: str) -> None:
        line = self.line
        found = self.next()
        if found != token:
            raise PtxError(f"expected {token!r}, found {found!r}", line)

    def accept(self, token: str) -> bool:
        if self.peek() == token:
            self.position += 1
            return True
        return False

    def integer(self) -> int:
        line = self.line
        negative = self.accept("-")
        token = self.next()
        if not token[0].isdigit():
            raise PtxError(f"expected an integer, found {token!r}", line)
        number = self._number(token, line)
        if number.kind != "int":
            raise PtxError(f"expected an integer, found {token!r}", line)
        return -number.value if negative else number.value

    def skip_statement(self) -> None:
        while self.next() != ";":
            pass

    @staticmethod
    def _number(token: str, line: int) -> Immediate:
        low = token.lower()
        if not low[0].isdigit():
            raise PtxError(f"expected a number, found {token!r}", line)
        if low.startswith("0f"):
            return Immediate(int(low[2:], 16), "f32")
        if low.startswith("0d"):
            return Immediate(int(low[2:], 16), "f64")
        if "." in low or ("e" in low and not low.startswith("0x")):
            return Immediate(int.from_bytes(struct.pack("<d", float(low)), "little"), "f64")
        low = low.rstrip("u")
        base = 16 if low.startswith("0x") else 2 if low.startswith("0b") else 8 if len(low) > 1 and low[0] == "0" else 10
        try:
            value = int(low, base)
        except ValueError:
            raise PtxError(f"malformed number {token!r}", line) from None
        if value >> 64:
            raise PtxError(f"the number {token} does not fit 64 bits", line)
        return Immediate(value)

    # ------------------------------------------------------------------------------------------------------- module level

    def parse(self) -> Module:
        linkage: set[str] = set()
        while self.position < len(self.tokens):
            line = self.line
            token = self.next()
            if token == ".version":
                self.module.version = self.next()
            elif token == ".target":
                self.module.target = self.next()
                while self.accept(","):
                    self.next()
            elif token == ".address_size":
                if self.integer() != 64:
                    raise PtxError("only .address_size 64 is supported", line)
            elif token in _LINKAGE:
                linkage.add(token)
                continue
            elif token in (".entry", ".func"):
                self._function(token == ".func", line)
            elif token in _SPACES or token == ".tex":
                for variable in self._variables(token, line, ".extern" in linkage):
                    self.module.variables[variable.name] = variable
            elif token == ".section":
                self._skip_section()
            elif token == ".file":
                self._file(line)
            elif token == ".loc":
                self._skip_line(line)
            elif token in (".pragma", ".alias"):
                self.skip_statement()
            elif token == ";":
                pass
            else:
                raise PtxError(f"unexpected {token!r} at module level", line)
            linkage = set()
        if not self.module.version:
            raise PtxError("no .version directive: this is not PTX")
        # The table of files comes last in what compilers write.
        for instruction, (file, number) in self.located:
            if file in self.files:
                instruction.source = f"{self.files[file]}:{number}"
        return self.module

    def _skip_section(self) -> None:
        while self.next() != "{":
            pass
        depth = 1
        while depth:
            token = self.next()
            depth += (token == "{") - (token == "}")

    def _file(self, line: int) -> None:
        """.file N "path": only the name is kept."""
        start = self.position
        self._skip_line(line)
        tokens = self.tokens[start : self.position]
        if len(tokens) >= 2 and tokens[0].isdigit() and tokens[1][:1] == '"':
            self.files[tokens[0]] = tokens[1].strip('"').replace("\\", "/").rsplit("/", 1)[-1]

    def _loc(self, line: int) -> None:
        """.loc file line column: where the instructions that follow come from."""
        start = self.position
        self._skip_line(line)
        tokens = self.tokens[start : self.position]
        self.source = (tokens[0], tokens[1]) if len(tokens) >= 2 and tokens[0].isdigit() and tokens[1].isdigit() else None

    def _locate(self, instruction: Instruction) -> None:
        if self.source is not None:
            self.located.append((instruction, self.source))

    def _skip_line(self, line: int) -> None:
        while self.position < len(self.tokens) and self.lines[self.position] == line:
            self.position += 1

    def _type(self) -> str:
        line = self.line
        token = self.next()
        name = token.lstrip(".")
        if not token.startswith(".") or name not in TYPE_BYTES:
            raise PtxError(f"unknown type {token!r}", line)
        return name

    def _variables(self, space: str, line: int, extern: bool) -> list[Variable]:
        space = space[1:]
        align = 0
        vector = 1
        while self.peek() in (".align", ".v2", ".v4", ".attribute", ".ptr"):
            token = self.next()
            if token == ".align":
                align = self._alignment()
            elif token == ".attribute":
                while self.next() != ")":
                    pass
            else:
                vector = int(token[2:])
        kind = self._type()
        element = TYPE_BYTES[kind] * vector
        result = []
        while True:
            name = self.next()
            count = 1
            known = True
            while self.accept("["):
                if self.accept("]"):
                    known = False
                    continue
                count *= self.integer()
                if count < 0:
                    raise PtxError(f"variable {name} has a negative dimension", line)
                self.expect("]")
            data: bytes | None = None
            references: list[tuple[int, str, int]] = []
            if self.accept("="):
                payload = bytearray()
                self._initializer(kind, payload, references)
                if not known:
                    count, known = -(-len(payload) // element), True
                if len(payload) > count * element:
                    raise PtxError(f"the initialiser of {name} is longer than the variable", line)
                data = bytes(payload.ljust(count * element, b"\0"))
            size = count * element if known else 0
            if size > 1 << 28:
                raise PtxError(f"variable {name} of {size} bytes is too large", line)
            result.append(Variable(name, space, kind, align or element, size, line, extern or not known, data, tuple(references)))
            if not self.accept(","):
                break
        self.expect(";")
        return result

    def _initializer(self, kind: str, payload: bytearray, references: list[tuple[int, str, int]], depth: int = 0) -> None:
        if self.accept("{"):
            if depth > 16:
                raise PtxError("an initialiser is nested too deeply", self.line)
            while not self.accept("}"):
                self._initializer(kind, payload, references, depth + 1)
                self.accept(",")
            return
        line = self.line
        size = TYPE_BYTES[kind]
        token = self.peek()
        if token[:1].isalpha() or token[:1] in "_$":
            self.next()
            if token == "generic":
                self.expect("(")
                token = self.next()
                self.expect(")")
            offset = 0
            if self.peek() in ("+", "-"):
                offset = self.integer() if self.peek() == "-" else (self.next(), self.integer())[1]
            references.append((len(payload), token, offset))
            payload += bytes(size)
            return
        negative = self.accept("-")
        number = self._number(self.next(), line)
        payload += _literal_bits(number, negative, kind).to_bytes(size, "little")

    def _alignment(self) -> int:
        value = self.integer()
        if value < 1 or value & (value - 1):
            raise PtxError(f".align {value} is no power of two", self.line)
        return value

    def _dims(self, directive: str) -> tuple[int, int, int]:
        values = [self.integer()]
        while self.accept(","):
            values.append(self.integer())
        if min(values) < 1:
            raise PtxError(f"{directive} {', '.join(map(str, values))}: a dimension below 1", self.line)
        values += [1] * (3 - len(values))
        return values[0], values[1], values[2]

    def _parameters(self) -> tuple[Parameter, ...]:
        self.expect("(")
        params: list[Parameter] = []
        offset = 0
        while not self.accept(")"):
            line = self.line
            token = self.next()
            if token == ",":
                continue
            if token == ".reg":
                self._type()
                self.next()
                continue
            if token != ".param":
                raise PtxError(f"expected .param, found {token!r}", line)
            align = 0
            kind = ""
            while self.peek().startswith("."):
                word = self.next()
                if word == ".align":
                    align = self._alignment()
                elif word[1:] in TYPE_BYTES:
                    kind = word[1:]
                elif word not in (".ptr", *_SPACES):
                    raise PtxError(f"unexpected {word!r} in a parameter", line)
            if not kind:
                raise PtxError("a parameter without a type", line)
            name = self.next()
            size = TYPE_BYTES[kind]
            # .ptr .align gives the alignment of what is pointed to, not of the parameter itself.
            if self.accept("["):
                size *= self.integer()
                self.expect("]")
                align = max(align, TYPE_BYTES[kind])
            else:
                align = size
            if align < 1 or align > 4096 or align & (align - 1):
                raise PtxError(f"parameter {name} has the alignment {align}, not a power of two up to 4096", line)
            offset = -(-offset // align) * align
            params.append(Parameter(name, size, align, offset))
            offset += size
        if offset > 32764:
            raise PtxError(f"the parameters take {offset} bytes, more than the 32,764 of a kernel", self.line)
        return tuple(params)

    # ----------------------------------------------------------------------------------------------------- function bodies

    def _function(self, is_function: bool, line: int) -> None:
        if is_function and self.peek() == "(":
            self._parameters()
        name = self.next()
        entry = Entry(name, line, is_function=is_function)
        if self.peek() == "(":
            entry.params = self._parameters()
        while self.peek() not in ("{", ";", ""):
            directive = self.next()
            if directive == ".maxntid":
                entry.maxntid = self._dims(directive)
            elif directive == ".reqntid":
                entry.reqntid = self._dims(directive)
            elif directive == ".reqnctapercluster":
                entry.cluster = self._dims(directive)
            elif directive == ".maxclusterrank":
                entry.max_cluster = self._dims(directive)[0]
            elif directive in (".minnctapersm", ".maxnreg", ".maxnctapersm"):
                self._dims(directive)
            elif directive == ".pragma":
                self.skip_statement()
            elif directive not in (".explicitcluster", ".blocksareclusters", ".noreturn"):
                raise PtxError(f"unknown directive {directive!r} of {name}", line)
        if self.accept(";"):
            return
        self.entry = entry
        self.branches = []
        self.scope = _Scope(None)
        self.expect("{")
        self._body()
        for instruction, scope in self.branches:
            self._resolve(instruction, scope)
        self.entry = None
        # A body that runs off its end returns.
        entry.instructions.append(Instruction(self.line, "ret", ()))
        if not is_function:
            if name in self.module.entries:
                raise PtxError(f"entry {name} is defined twice", line)
            self.module.entries[name] = entry

    def _body(self) -> None:
        """Statements up to the closing brace of the function, scopes included (iterative: hostile nesting cannot overflow the stack)."""
        entry = self.entry
        assert entry is not None
        depth = 1
        while depth:
            line = self.line
            token = self.next()
            if token == "{":
                depth += 1
                self.scope = _Scope(self.scope)
            elif token == "}":
                depth -= 1
                if depth:
                    assert self.scope.parent is not None
                    self.scope = self.scope.parent
            elif token == ";":
                pass
            elif token == ".reg":
                self._registers(line)
            elif token in (".shared", ".local", ".global", ".const", ".param"):
                self._local_variables(token, line)
            elif token == ".loc":
                self._loc(line)
            elif token == ".file":
                self._file(line)
            elif token == ".pragma":
                self.skip_statement()
            elif token in (".branchtargets", ".calltargets", ".callprototype"):
                raise PtxError(f"{token} without a label", line)
            elif self.peek() == ":" and token[0] != "@":
                self.next()
                if self.peek() == ".branchtargets":
                    self.next()
                    names = [self.next()]
                    while self.accept(","):
                        names.append(self.next())
                    self.expect(";")
                    self.scope.tables[token] = tuple(names)
                    continue
                if self.peek() in (".calltargets", ".callprototype"):
                    self.skip_statement()
                    continue
                if token in self.scope.labels:
                    raise PtxError(f"label {token} is defined twice in one scope", line)
                self.scope.labels[token] = len(entry.instructions)
            else:
                self._instruction(token, line)

    def _registers(self, line: int) -> None:
        kind = self._type()
        entry = self.entry
        assert entry is not None
        while True:
            name = self.next()
            if self.accept("<"):
                count = self.integer()
                self.expect(">")
                if not 0 <= count <= 1 << 20:
                    raise PtxError(f"{count} registers {name} are too many", line)
                self.scope.ranges[name] = (kind, count)
            else:
                self.scope.registers[name] = self._new_register(name, kind)
            if not self.accept(","):
                break
        self.expect(";")

    def _new_register(self, name: str, kind: str) -> Register:
        entry = self.entry
        assert entry is not None
        bits = 1 if kind == "pred" else max(16, 8 * TYPE_BYTES[kind])
        index = entry.register_counts.get(bits, 0)
        entry.register_counts[bits] = index + 1
        return Register(name, kind, index)

    def _local_variables(self, token: str, line: int) -> None:
        entry = self.entry
        assert entry is not None
        for variable in self._variables(token, line, False):
            unique = variable.name
            if unique in entry.variables:
                self.unique += 1
                unique = f"{unique}@{self.unique}"
            self.scope.variables[variable.name] = unique
            entry.variables[unique] = variable

    def _lookup_register(self, name: str) -> Register | None:
        scope: _Scope | None = self.scope
        while scope is not None:
            register = scope.registers.get(name)
            if register is not None:
                return register
            if scope.ranges:
                stem = name.rstrip("0123456789")
                # A range's own stem may end in digits; try every split.
                for cut in range(len(stem), len(name)):
                    found = scope.ranges.get(name[:cut])
                    digits = name[cut:]
                    if found is not None and (digits == "0" or digits[0] != "0") and int(digits) < found[1]:
                        register = self._new_register(name, found[0])
                        scope.registers[name] = register
                        return register
            scope = scope.parent
        return None

    def _resolve(self, instruction: Instruction, scope: _Scope) -> None:
        def find(label: str) -> int:
            place: _Scope | None = scope
            while place is not None:
                if label in place.labels:
                    return place.labels[label]
                place = place.parent
            raise PtxError(f"branch to the unknown label {label}", instruction.line)

        if instruction.opcode.startswith("brx"):
            place: _Scope | None = scope
            while place is not None:
                if instruction.label in place.tables:
                    instruction.targets = tuple(find(name) for name in place.tables[instruction.label])
                    return
                place = place.parent
            raise PtxError(f"brx.idx with the unknown table {instruction.label}", instruction.line)
        instruction.target = find(instruction.label)

    def _instruction(self, token: str, line: int) -> None:
        entry = self.entry
        assert entry is not None
        guard: Register | None = None
        negated = False
        if token == "@":
            negated = self.accept("!")
            name = self.next()
            guard = self._lookup_register(name)
            if guard is None or guard.type != "pred":
                raise PtxError(f"the guard {name} is not a predicate register", line)
            token = self.next()
        if not token[0].isalpha():
            raise PtxError(f"unexpected {token!r}", line)
        base = token.split(".", 1)[0]
        if base in _BRANCHES:
            operands: list[Operand] = []
            if base == "brx":
                operands.append(self._operand())
                self.expect(",")
            instruction = Instruction(line, token, Operands(operands), guard, negated, label=self.next())
            self.expect(";")
            self.branches.append((instruction, self.scope))
            entry.instructions.append(instruction)
            self._locate(instruction)
            return
        if base == "call":
            raise PtxError("call of a .func is not supported: inline the function", line)
        operands = []
        if not self.accept(";"):
            while True:
                operands.append(self._operand())
                if self.accept(","):
                    continue
                self.expect(";")
                break
        instruction = Instruction(line, token, Operands(operands), guard, negated)
        entry.instructions.append(instruction)
        self._locate(instruction)

    def _operand(self) -> Operand:
        operand = self._simple_operand()
        if self.accept("|"):
            return Pair(operand, self._simple_operand())
        return operand

    def _simple_operand(self) -> Operand:
        line = self.line
        token = self.next()
        if token == "{":
            items: list[Operand] = []
            while not self.accept("}"):
                if self.peek() in ("{", "["):
                    raise PtxError(f"unexpected {self.peek()!r} in a vector operand", self.line)
                items.append(self._simple_operand())
                self.accept(",")
            return Vector(tuple(items))
        if token == "[":
            return self._address(line)
        if token == "!":
            name = self.next()
            register = self._lookup_register(name)
            if register is None:
                raise PtxError(f"unknown register {name}", line)
            return Negated(register)
        if token == "-":
            number = self._number(self.next(), line)
            if number.kind == "f32":
                return Immediate(number.value ^ 0x8000_0000, "f32")
            if number.kind == "f64":
                return Immediate(number.value ^ (1 << 63), "f64")
            return Immediate(-number.value)
        if token == "~":
            return Immediate(~self._number(self.next(), line).value)
        if token[0].isdigit():
            return self._number(token, line)
        if token == "_":
            return Sink()
        return self._name(token, line)

    def _name(self, token: str, line: int) -> Operand:
        register = self._lookup_register(token)
        if register is not None:
            return register
        if token[0] == "%":
            if _SPECIAL.match(token):
                return Special(token)
            stem, _, part = token.rpartition(".")
            if part in "xyzw" and stem and self._lookup_register(stem) is not None:
                raise PtxError(f"vector register component {token} is not supported", line)
            raise PtxError(f"unknown register {token}", line)
        if token == "WARP_SZ":
            return Immediate(32)
        if not (token[0].isalpha() or token[0] in "_$"):
            raise PtxError(f"unexpected operand {token!r}", line)
        scope: _Scope | None = self.scope
        name = token
        while scope is not None:
            if token in scope.variables:
                name = scope.variables[token]
                break
            scope = scope.parent
        offset = 0
        if self.peek() in ("+", "-"):
            offset = -self._offset() if self.next() == "-" else self._offset()
        return Symbol(name, offset)

    def _offset(self) -> int:
        return self.integer()

    def _address(self, line: int) -> Address:
        token = self.next()
        base: Operand
        if token[0].isdigit():
            base = self._number(token, line)
        elif token == "-":
            base = Immediate(-self._number(self.next(), line).value)
        else:
            base = self._name(token, line)
        offset = 0
        while self.peek() in ("+", "-"):
            offset += -self._offset() if self.next() == "-" else self._offset()
        if isinstance(base, Symbol):
            base, offset = Symbol(base.name), base.offset + offset
        coordinates: tuple[Operand, ...] = ()
        if self.accept(","):
            vector = self._simple_operand()
            coordinates = vector.items if isinstance(vector, Vector) else (vector,)
            while self.accept(","):
                self._simple_operand()
        self.expect("]")
        if not isinstance(base, Register | Symbol | Immediate):
            raise PtxError("an address must be a register, a variable or a constant", line)
        return Address(base, offset, coordinates)


def _literal_bits(number: Immediate, negative: bool, kind: str) -> int:
    """Bits of a literal as a value of PTX type `kind`."""
    size = TYPE_BYTES[kind]
    if number.kind == "int" and kind not in ("f16", "bf16", "f32", "f64"):
        return (-number.value if negative else number.value) & ((1 << 8 * size) - 1)
    if number.kind == "int":
        value = float(number.value)
    else:
        value = float(
            np.array(number.value, np.uint32 if number.kind == "f32" else np.uint64).view(
                np.float32 if number.kind == "f32" else np.float64
            )
        )
        if number.kind == kind and not negative:
            return number.value
    value = -value if negative else value
    with np.errstate(over="ignore"):
        if kind == "f64":
            return int.from_bytes(struct.pack("<d", value), "little")
        if kind == "f32":
            return int(np.float32(value).view(np.uint32))
        if kind == "f16":
            return int(np.float16(value).view(np.uint16))
        if kind == "bf16":
            bits = int(np.float32(value).view(np.uint32))
            return (bits + 0x7FFF + (bits >> 16 & 1) >> 16 if math.isfinite(value) else bits >> 16) & 0xFFFF
    if not math.isfinite(value):
        raise PtxFault(f"an initialiser of .{kind} is not a number")
    return int(value) & ((1 << 8 * size) - 1)


def parse(text: str) -> Module:
    """Parse PTX text. PtxError with the line for anything malformed."""
    parser = _Parser(text)
    try:
        return parser.parse()
    except PtxFault as error:
        raise PtxError(str(error), parser.line) from error
