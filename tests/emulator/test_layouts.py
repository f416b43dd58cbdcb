"""Layout maps: against the tables they come from, against each other, and by writing a matrix one way and reading it another."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fa4gen.codegen.emulator import layouts as L

ATOM32 = L.SWIZZLE_128B_ATOM_32B
MODES = (0, 32, 64, 128, ATOM32)


# ---------------------------------------------------------------------------------------------------------------- swizzle


def test_swizzle_of_128_bytes_moves_chunk_c_of_row_r_to_c_xor_r() -> None:
    for row, chunk, byte in itertools.product(range(8), range(8), (0, 15)):
        assert L.swizzle(4096 + 128 * row + 16 * chunk + byte, 128) == 4096 + 128 * row + 16 * (chunk ^ row) + byte


@pytest.mark.parametrize(
    ("mode", "address", "moved"),
    [
        (64, 0x1080, 0x1090),
        (64, 0x1100, 0x1120),
        (64, 0x1200, 0x1200),
        (32, 0x1080, 0x1090),
        (32, 0x1100, 0x1100),
        (ATOM32, 0x1080, 0x10A0),
    ],
)
def test_narrower_swizzles(mode: int, address: int, moved: int) -> None:
    assert L.swizzle(address, mode) == moved


@given(address=st.integers(0, 2**18 - 1), mode=st.sampled_from(MODES))
def test_swizzle_is_its_own_inverse_inside_its_period(address: int, mode: int) -> None:
    moved = L.swizzle(address, mode)
    assert L.swizzle(moved, mode) == address
    assert moved >> 7 == address >> 7
    assert moved % 16 == address % 16


def test_base_offset_counts_rows_from_the_pattern_start() -> None:
    start = 0x400 + 3 * 128
    moved = [L.swizzle(start + 128 * row, 128, base_offset=3) for row in range(8)]
    assert moved == [start + 128 * row + 16 * row for row in range(8)]


def test_unknown_swizzle_is_refused() -> None:
    with pytest.raises(ValueError, match="mode 16"):
        L.swizzle(0, 16)


@pytest.mark.parametrize(("phase", "mode"), [(0, 128), (256, 128), (896, 128), (384, 64), (128, 32), (48, 0)])
def test_swizzle_chunks_agree_with_addresses(phase: int, mode: int) -> None:
    address = 5 * 1024 + phase
    chunks = L.swizzle_chunks(phase, 40, mode)
    assert (address + 16 * chunks == L.swizzle(address + 16 * np.arange(40), mode)).all()
    assert chunks.min() >= 0
    assert not chunks.flags.writeable


def test_misaligned_tiles_are_refused() -> None:
    with pytest.raises(ValueError, match="128 bytes"):
        L.swizzle_chunks(16, 8, 128)
    with pytest.raises(ValueError, match="16 bytes"):
        L.swizzle_chunks(8, 8, 0)


# ------------------------------------------------------------------------------------------------- matrix descriptors

offsets = st.integers(0, 2**14 - 1).map(lambda x: 16 * x)


@given(start=offsets, leading=offsets, stride=offsets, base=st.integers(0, 7), mode=st.sampled_from(MODES))
def test_descriptors_round_trip(start: int, leading: int, stride: int, base: int, mode: int) -> None:
    descriptor = L.MatrixDescriptor(start, leading, stride, base, mode)
    blackwell = L.encode_tcgen05_descriptor(descriptor)
    assert L.decode_tcgen05_descriptor(blackwell) == descriptor
    if mode != ATOM32:
        hopper = L.encode_wgmma_descriptor(descriptor)
        assert L.decode_wgmma_descriptor(hopper) == descriptor
        assert hopper | 1 << 46 == blackwell  # the two formats differ by the version bit alone


def test_descriptor_fields_are_where_the_isa_has_them() -> None:
    value = 0x1234 | 0x0001 << 16 | 0x0040 << 32 | 1 << 62
    assert L.decode_wgmma_descriptor(value) == L.MatrixDescriptor(0x12340, 16, 1024, 0, 128)
    assert L.decode_tcgen05_descriptor(value | 1 << 46) == L.MatrixDescriptor(0x12340, 16, 1024, 0, 128)
    assert L.decode_wgmma_descriptor(2 << 62).swizzle == 64
    assert L.decode_wgmma_descriptor(3 << 62).swizzle == 32
    assert L.decode_tcgen05_descriptor(1 << 61 | 1 << 46).swizzle == ATOM32


@pytest.mark.parametrize(
    ("decode", "value", "message"),
    [
        (L.decode_wgmma_descriptor, 1 << 46, "reserved"),
        (L.decode_wgmma_descriptor, 1 << 14, "reserved"),
        (L.decode_tcgen05_descriptor, 0, "0b001"),
        (L.decode_tcgen05_descriptor, 1 << 47, "0b001"),
        (L.decode_tcgen05_descriptor, 1 << 46 | 1 << 48, "reserved"),
        (L.decode_tcgen05_descriptor, 1 << 46 | 1 << 52, "bit 52"),
        (L.decode_tcgen05_descriptor, 1 << 46 | 3 << 61, "swizzle mode 3"),
    ],
)
def test_bad_descriptors_are_refused_in_one_line(decode: Any, value: int, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        decode(value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("descriptor", "message"),
    [
        ((8, 0, 0, 0, 0), "start 8"),
        ((0, 1 << 18, 0, 0, 0), "leading"),
        ((0, 0, 0, 8, 0), "base offset"),
        ((0, 0, 0, 0, ATOM32), "no swizzle"),
    ],
)
def test_descriptors_that_cannot_be_encoded_are_refused(descriptor: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        L.encode_wgmma_descriptor(L.MatrixDescriptor(*descriptor))


class Smem:
    """Shared memory of 16-bit elements that TMA boxes are loaded into."""

    def __init__(self) -> None:
        self.words = np.full(1 << 16, 0xFFFF, np.uint16)

    def load(self, matrix: np.ndarray, box: tuple[int, int], coords: tuple[int, int], address: int, mode: int) -> None:
        """One two-dimensional box of `matrix`; coords innermost first."""
        source, target, inside = L.tma_tile(matrix.shape, matrix.strides[:-1], box, coords, 2, address, mode)
        assert inside.all()
        self.words[target // 2] = matrix.reshape(-1)[source // 2]

    def read(self, descriptor: L.MatrixDescriptor, mn: int, k: int, major: str) -> np.ndarray:
        return self.words[L.operand_offsets(descriptor, mn, k, 2, major) // 2]


def _matrix(rows: int, columns: int) -> np.ndarray:
    assert rows * columns < 0xFFFF
    return np.arange(rows * columns, dtype=np.uint16).reshape(rows, columns)


@pytest.mark.parametrize("mode", [32, 64, 128])
def test_k_major_operand_from_swizzled_boxes(mode: int) -> None:
    """Rows of 128 elements as boxes one swizzle width wide; each k step moves the start address."""
    rows, width = 64, mode // 2
    matrix, smem = _matrix(rows, 128), Smem()
    for box in range(128 // width):
        smem.load(matrix, (rows, width), (box * width, 0), 1024 + box * rows * mode, mode)
    for step in range(8):
        box, inside = divmod(16 * step, width)
        descriptor = L.MatrixDescriptor(1024 + box * rows * mode + 2 * inside, 16, 8 * mode, 0, mode)
        assert (smem.read(descriptor, rows, 16, "k") == matrix[:, 16 * step : 16 * step + 16]).all()


def test_k_major_operand_without_swizzle() -> None:
    """Boxes of 16-byte rows: 8-row groups are 128 bytes apart (SBO), 16-byte k chunks a whole box apart (LBO)."""
    rows = 64
    matrix, smem = _matrix(rows, 128), Smem()
    for chunk in range(16):
        smem.load(matrix, (rows, 8), (8 * chunk, 0), 512 + chunk * rows * 16, 0)
    for step in range(8):
        descriptor = L.MatrixDescriptor(512 + 2 * step * rows * 16, rows * 16, 128, 0, 0)
        assert (smem.read(descriptor, rows, 16, "k") == matrix[:, 16 * step : 16 * step + 16]).all()


@pytest.mark.parametrize("mode", [32, 64, 128])
def test_mn_major_operand_from_swizzled_boxes(mode: int) -> None:
    """V [keys, depth] as B with N = depth: boxes one swizzle width of depth wide (LBO), 8-key groups 8 rows apart (SBO)."""
    keys, depth, width = 64, 128, mode // 2
    matrix, smem = _matrix(keys, depth), Smem()
    for box in range(depth // width):
        smem.load(matrix, (keys, width), (box * width, 0), 2048 + box * keys * mode, mode)
    for step in range(keys // 16):
        descriptor = L.MatrixDescriptor(2048 + step * 16 * mode, keys * mode, 8 * mode, 0, mode)
        assert (smem.read(descriptor, depth, 16, "mn") == matrix[16 * step : 16 * step + 16].T).all()


def test_mn_major_operand_without_swizzle() -> None:
    """LBO and SBO swap roles: SBO separates 16-byte chunks along MN, LBO groups of 8 along K."""
    keys, depth = 32, 64
    matrix, smem = _matrix(keys, depth), Smem()
    for chunk in range(depth // 8):
        smem.load(matrix, (keys, 8), (8 * chunk, 0), chunk * keys * 16, 0)
    for step in range(keys // 16):
        descriptor = L.MatrixDescriptor(step * 256, 128, keys * 16, 0, 0)
        assert (smem.read(descriptor, depth, 16, "mn") == matrix[16 * step : 16 * step + 16].T).all()


def test_operand_past_the_swizzle_period_wraps_by_absolute_address() -> None:
    """A tile that does not start on 1024 bytes but was written by the same absolute pattern reads back with base offset 0."""
    matrix, smem = _matrix(16, 64), Smem()
    smem.load(matrix, (16, 64), (0, 0), 1024 + 256, 128)
    assert (smem.read(L.MatrixDescriptor(1024 + 256, 0, 1024, 0, 128), 16, 64, "k") == matrix).all()


@settings(max_examples=60)
@given(
    mode=st.sampled_from([0, 32, 64, 128]),
    major=st.sampled_from(["k", "mn"]),
    size=st.sampled_from([1, 2]),
    mn=st.sampled_from([8, 64, 128]),
)
def test_elements_of_packed_operands_never_overlap(mode: int, major: str, size: int, mn: int) -> None:
    k = 32 // size
    width = mode or 16
    if major == "k":
        leading, stride = (mn * 16, 128) if mode == 0 else (0, 8 * width)
    else:
        mn = max(mn, width // size)
        leading, stride = (128, k * 16) if mode == 0 else (k * width, 8 * width)
    addresses = L.operand_offsets(L.MatrixDescriptor(1024, leading, stride, 0, mode), mn, k, size, major)
    assert addresses.shape == (mn, k)
    assert len(np.unique(addresses)) == mn * k
    assert not addresses.flags.writeable
    if major == "mn" or mode in (0, 32):  # no gaps either
        assert addresses.max() - addresses.min() == (mn * k - 1) * size


def test_atom_of_32_bytes_is_for_mn_major_words() -> None:
    descriptor = L.MatrixDescriptor(0, 1024, 512, 0, ATOM32)
    assert len(np.unique(L.operand_offsets(descriptor, 64, 8, 4, "mn"))) == 512
    for size, major in ((2, "mn"), (4, "k")):
        with pytest.raises(ValueError, match="32-byte atoms"):
            L.operand_offsets(descriptor, 64, 8, size, major)
    with pytest.raises(ValueError, match="32-byte atoms"):
        L.operand_offsets(L.MatrixDescriptor(0, 1024, 512, 0, 128), 64, 8, 4, "mn")


def test_bad_operands_are_refused() -> None:
    descriptor = L.MatrixDescriptor(0, 0, 512, 0, 64)
    with pytest.raises(ValueError, match="longer than the 64-byte swizzle"):
        L.operand_offsets(descriptor, 8, 64, 2, "k")
    with pytest.raises(ValueError, match="neither"):
        L.operand_offsets(descriptor, 8, 16, 2, "row")
    with pytest.raises(ValueError, match="8 bytes"):
        L.operand_offsets(descriptor, 8, 4, 8, "k")


# -------------------------------------------------------------------------------------------------- register fragments


@pytest.mark.parametrize("n", [8, 16, 64, 256])
def test_wgmma_accumulator_covers_its_matrix_once(n: int) -> None:
    rows, cols = L.wgmma_d_fragment(n)
    assert rows.shape == cols.shape == (128, n // 2)
    assert len(set(zip(rows.ravel().tolist(), cols.ravel().tolist(), strict=True))) == 64 * n
    # thread 37: warp 1, group 1, quad 1; registers 4j + 2h + v
    assert rows[37, :4].tolist() == [17, 17, 25, 25]
    assert cols[37, :4].tolist() == [2, 3, 2, 3]


def test_wgmma_a_registers_are_the_accumulators_of_the_last_product() -> None:
    """P for k step s comes from accumulator registers 8s .. 8s + 7 packed pairwise, without shuffles."""
    d_rows, d_cols = L.wgmma_d_fragment(64)
    a_rows, a_cols = L.wgmma_a_fragment()
    for step in range(4):
        part = slice(8 * step, 8 * step + 8)
        assert (a_rows.reshape(128, 8) == d_rows[:, part]).all()
        assert (a_cols.reshape(128, 8) + 16 * step == d_cols[:, part]).all()


def test_mma_fragments_multiply() -> None:
    """Product of matrices held in fragments, computed lane by lane from what the maps say each lane holds."""
    for k in (8, 16):
        (ar, ac), (bk, bn), (dr, dc) = L.mma_a_fragment(k), L.mma_b_fragment(k), L.mma_d_fragment()
        rng = np.random.default_rng(k)
        a, b = rng.integers(-9, 9, (16, k)), rng.integers(-9, 9, (k, 8))
        a_back, b_back = np.full((16, k), 99), np.full((k, 8), 99)
        a_back[ar, ac], b_back[bk, bn] = a[ar, ac], b[bk, bn]
        assert ((a_back @ b_back)[dr, dc] == (a @ b)[dr, dc]).all()
        assert len(set(zip(dr.ravel().tolist(), dc.ravel().tolist(), strict=True))) == 128
    with pytest.raises(ValueError, match="k32"):
        L.mma_a_fragment(32)


def test_ldmatrix_loads_mma_operands() -> None:
    """x4 over the four 8x8 quarters of A gives the A fragment; .trans over B stored [k][n] gives the B fragment."""
    matrix = np.arange(256).reshape(16, 16)
    supplier, element = L.ldmatrix_map(4)
    row_of_lane = np.array([[lane % 8 + 8 * (lane // 8 % 2), 8 * (lane // 16)] for lane in range(32)])
    loaded = matrix[row_of_lane[supplier, 0], row_of_lane[supplier, 1] + element]
    rows, cols = L.mma_a_fragment()
    assert (loaded == matrix[rows, cols]).all()
    supplier, element = L.ldmatrix_map(2, trans=True)
    assert ((supplier // 8) == np.arange(2)[None, :, None]).all()
    b = np.arange(128).reshape(16, 8)
    ks, ns = L.mma_b_fragment()
    assert (b[supplier, element] == b[ks, ns]).all()
    with pytest.raises(ValueError, match="x3"):
        L.ldmatrix_map(3)


# ------------------------------------------------------------------------------------------------------- tensor memory


@pytest.mark.parametrize(("shape", "num"), [(s, n) for s in L.TMEM_SHAPES for n in (1, 2, 4, 16, 32)])
def test_tmem_map_covers_its_cells_once(shape: str, num: int) -> None:
    registers, _, lanes, columns = L.TMEM_SHAPES[shape]
    lane, column = L.tmem_map(shape, num, half_split=num if shape == "16x32bx2" else 0)
    assert lane.shape == column.shape == (32, registers * num)
    cells = set(zip(lane.ravel().tolist(), column.ravel().tolist(), strict=True))
    width = columns * num * (2 if shape == "16x32bx2" else 1)
    assert cells == set(itertools.product(range(lanes), range(width)))
    packed_lane, packed = L.tmem_map(shape, num, half_split=2 * num if shape == "16x32bx2" else 0, pack16=True)
    assert packed.shape == (32, registers * num, 2)
    assert (packed_lane == lane).all()
    assert len(set(zip(np.repeat(lane.ravel(), 2).tolist(), packed.ravel().tolist(), strict=True))) == 2 * len(cells)
    assert (packed[..., 1] == packed[..., 0] + 1).all()


def test_tmem_shapes_follow_the_register_fragments() -> None:
    lane, column = L.tmem_map("16x256b", 2)
    rows, cols = L.wgmma_d_fragment(16)
    assert (lane == rows[:32]).all()
    assert (column == cols[:32]).all()
    lane, column = L.tmem_map("32x32b", 4)
    assert lane[7].tolist() == [7] * 4
    assert column[7].tolist() == [0, 1, 2, 3]
    lane, column = L.tmem_map("16x64b", 2)
    assert (lane[6].tolist(), column[6].tolist()) == ([1, 1], [1, 3])
    lane, column = L.tmem_map("16x128b", 1)
    assert (lane[6].tolist(), column[6].tolist()) == ([1, 9], [2, 2])


@pytest.mark.parametrize(("shape", "num"), [("32x32b", 256), ("16x128b", 128), ("16x256b", 64), ("32x32b", 3), ("32x32b", 0), ("8x8b", 1)])
def test_tmem_repetitions_are_checked(shape: str, num: int) -> None:
    with pytest.raises(ValueError, match=r"tcgen05\.ld/st"):
        L.tmem_map(shape, num)


def test_half_split_belongs_to_one_shape() -> None:
    with pytest.raises(ValueError, match="half-split"):
        L.tmem_map("32x32b", 4, half_split=2)


LAYOUTS = [(128, 256, True), (128, 64, False), (64, 128, True), (64, 256, True), (32, 64, True), (32, 256, True), (64, 256, False)]


@pytest.mark.parametrize(("m", "n", "ws"), LAYOUTS)
def test_accumulators_have_one_cell_an_element(m: int, n: int, ws: bool) -> None:
    lane, column = L.tcgen05_d_layout(m, n, ws)
    assert lane.shape == column.shape == (m, n)
    assert len(set(zip(lane.ravel().tolist(), column.ravel().tolist(), strict=True))) == m * n
    assert column.max() + 1 == L.tcgen05_d_columns(m, n, ws)
    assert lane.max() < 128


def test_accumulator_layouts_by_name() -> None:
    g = L.tcgen05_d_layout(32, 256, True)
    assert [x[5, 200] for x in g] == [5 + 96, 8]
    e = L.tcgen05_d_layout(64, 128, True)
    assert [x[40, 70] for x in e] == [40 + 64, 6]
    d = L.tcgen05_d_layout(128, 128, True)
    assert [x[100, 70] for x in d] == [100, 70]
    f = L.tcgen05_d_layout(64, 128, False)
    assert [x[20, 70] for x in f] == [32 + 4, 70]
    assert L.tcgen05_d_layout(64, 128, False, base_lane=16)[0][20, 0] == 52
    with pytest.raises(ValueError, match="lane 16"):
        L.tcgen05_d_layout(32, 128, True, base_lane=16)
    with pytest.raises(ValueError, match="no M=32"):
        L.tcgen05_d_layout(32, 128, False)


def test_a_warp_reads_its_quarter_of_an_m32_accumulator() -> None:
    """32x32b by warp w, thread t: row t, logical columns [w * N / 4, (w + 1) * N / 4)."""
    values = np.arange(32 * 256).reshape(32, 256)
    memory = np.full((128, 512), -1)
    lane, column = L.tcgen05_d_layout(32, 256, True)
    memory[lane, column] = values
    t, r = L.tmem_map("32x32b", 64)
    for warp in range(4):
        assert (memory[32 * warp + t, r] == values[:, 64 * warp : 64 * warp + 64]).all()


@pytest.mark.parametrize(("m", "ws", "groups"), [(32, True, 4), (64, True, 2), (128, True, 1), (128, False, 1), (64, False, 1)])
def test_a_operand_in_tensor_memory_is_banked_by_lane_group(m: int, ws: bool, groups: int) -> None:
    lane, column, half = L.tcgen05_a_layout(m, 16, ws)
    assert lane.shape == (groups, m)
    assert column.tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7]
    assert half.tolist() == [0, 1] * 8
    # Group g reads the lanes in which the columns of group g of D lie.
    d_lane, _ = L.tcgen05_d_layout(m, 64, ws)
    for group in range(groups):
        assert (lane[group] == d_lane[:, group * 64 // groups]).all()


# ------------------------------------------------------------------------------------------------ instruction descriptor


def test_instruction_descriptor_of_the_fact_sheet() -> None:
    descriptor = L.InstructionDescriptor(m=32, n=256)
    assert L.encode_instruction_descriptor(descriptor, ws=True) == 0x02400490 == 37749904
    assert L.decode_instruction_descriptor(0x02400490, ws=True) == descriptor


@given(
    shape=st.sampled_from([(32, 64), (64, 128), (128, 256)]),
    formats=st.sampled_from([("f16", "f16", "f16"), ("f16", "f16", "f32"), ("bf16", "f16", "f32"), ("bf16", "bf16", "f32")]),
    majors=st.tuples(st.sampled_from(["k", "mn"]), st.sampled_from(["k", "mn"])),
    negate=st.tuples(st.booleans(), st.booleans()),
    shift=st.sampled_from([0, 8, 16, 32]),
)
def test_instruction_descriptors_round_trip(
    shape: tuple[int, int], formats: tuple[str, str, str], majors: tuple[str, str], negate: tuple[bool, bool], shift: int
) -> None:
    descriptor = L.InstructionDescriptor(*shape, *formats, *majors, *negate, shift)
    assert L.decode_instruction_descriptor(L.encode_instruction_descriptor(descriptor, True), True) == descriptor


BASE = 0x02400490


@pytest.mark.parametrize(
    ("value", "ws", "message"),
    [
        (BASE | 4, True, "sparse"),
        (BASE | 8, True, "saturate"),
        (BASE | 1 << 6, True, "reserved"),
        (BASE | 1 << 29, True, "reserved"),
        (BASE | 2 << 7, True, "A=3"),
        (BASE & ~(3 << 4) | 2 << 4, True, "D=2"),
        (BASE & ~(3 << 4), True, "f16 accumulator"),
        (BASE, False, "M=32, N=256"),
        (BASE & ~(63 << 17) | 4 << 17, True, "N=32"),
        (BASE & ~(31 << 24) | 8 << 24 | 1 << 30, False, "column shift"),
        (BASE & ~(31 << 24) & ~(63 << 17) | 8 << 24 | 3 << 17, False, "M=128, N=24"),
        (BASE & ~(31 << 24) | 16 << 24, False, "M=256"),
    ],
)
def test_illegal_instruction_descriptors_are_refused(value: int, ws: bool, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        L.decode_instruction_descriptor(value, ws)
    assert "\n" not in str(caught.value)


def test_m64_without_ws_takes_steps_of_8() -> None:
    assert L.decode_instruction_descriptor(BASE & ~(31 << 24) & ~(63 << 17) | 4 << 24 | 3 << 17, False).n == 24


def test_zero_column_mask_switch() -> None:
    assert not L.zero_column_mask_enabled(0)
    assert L.zero_column_mask_enabled(1 << 39)


# -------------------------------------------------------------------------------------------------------------- TMA tiles


@st.composite
def tiles(draw: st.DrawFn) -> dict[str, Any]:
    rank = draw(st.integers(1, 4))
    shape = tuple(draw(st.integers(1, 9)) for _ in range(rank))
    box = tuple(draw(st.integers(1, 6)) for _ in range(rank))
    element_strides = draw(st.one_of(st.none(), st.tuples(*(st.integers(1, 3) for _ in range(rank)))))
    coords = tuple(draw(st.integers(-5, 10)) for _ in range(rank))
    size = draw(st.sampled_from([1, 2, 4]))
    strides, step = [], size * shape[-1]
    for extent in shape[-2::-1] if rank > 1 else ():
        step += draw(st.integers(0, 40))
        strides.append(step)
        step *= extent
    return {
        "shape": shape,
        "strides": tuple(reversed(strides)),
        "box": box,
        "coords": coords,
        "element_bytes": size,
        "element_strides": element_strides,
    }


@settings(max_examples=200, deadline=None)
@given(tile=tiles())
def test_tma_tile_element_by_element(tile: dict[str, Any]) -> None:
    shape, strides, box, size = tile["shape"], tile["strides"], tile["box"], tile["element_bytes"]
    steps = [*(tile["element_strides"] or (1,) * len(shape))]
    steps[-1] = 1  # the innermost stride is ignored
    counts = [-(-b // s) for b, s in zip(box, steps, strict=True)]
    source, target, inside = L.tma_tile(**tile, smem_address=4096)
    rows = L.tma_rows(**tile)
    assert source.shape == target.shape == inside.shape == tuple(counts)
    everything = True
    for linear, index in enumerate(itertools.product(*map(range, counts))):
        at = [c + s * i for c, s, i in zip(reversed(tile["coords"]), steps, index, strict=True)]
        legal = all(0 <= a < extent for a, extent in zip(at, shape, strict=True))
        everything &= legal
        assert inside[index] == legal
        assert target[index] == 4096 + linear * size
        if legal:
            assert source[index] == sum(a * s for a, s in zip(at, (*strides, size), strict=True))
    assert rows.whole == everything
    assert rows.box_bytes == np.prod(counts) * size
    # The same box copied row by row.
    memory = np.arange(1, 1 + shape[0] * (strides[0] if strides else shape[0] * size), dtype=np.int64)
    by_element, by_row = np.zeros(rows.box_bytes, np.int64), np.zeros(rows.box_bytes, np.int64)
    for byte in range(size):
        by_element[target[inside] - 4096 + byte] = memory[source[inside] + byte]
    for i in np.nonzero(rows.inside)[0]:
        start = i * rows.row_bytes + rows.first
        by_row[start : start + rows.length] = memory[rows.global_offset[i] : rows.global_offset[i] + rows.length]
    assert (by_element == by_row).all()


def test_swizzled_tile_is_the_dense_one_with_chunks_moved() -> None:
    shape, box = (16, 64), (16, 64)
    arguments = (shape, (128,), box, (0, 0), 2)
    _, dense, _ = L.tma_tile(*arguments, 1280, 0)
    _, moved, _ = L.tma_tile(*arguments, 1280, 128)
    assert (moved == L.swizzle(dense, 128)).all()
    chunks = L.swizzle_chunks(1280 % 1024, 128, 128)
    assert (moved.reshape(-1, 8)[:, 0] == 1280 + 16 * chunks).all()


def test_bad_tiles_are_refused() -> None:
    with pytest.raises(ValueError, match="rank-2"):
        L.tma_rows((4, 4), (), (4, 4), (0, 0), 2)
    with pytest.raises(ValueError, match="wider"):
        L.tma_tile((4, 64), (128,), (4, 64), (0, 0), 2, 0, 64)
    with pytest.raises(ValueError, match="aligned"):
        L.tma_tile((4, 64), (128,), (4, 64), (0, 0), 2, 64, 128)


def test_maps_are_shared_and_read_only() -> None:
    assert L.tmem_map("32x32b", 8) is L.tmem_map("32x32b", 8)
    maps = (L.wgmma_d_fragment(8), L.wgmma_a_fragment(), L.ldmatrix_map(4), L.tcgen05_d_layout(32, 64, True), L.mma_b_fragment())
    for array in itertools.chain(*maps):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 0
