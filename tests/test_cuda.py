"""The GPU backend: what it says without a GPU; with one, unit kernels bit-equal to the emulator, the full kernel against float64."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from fa4gen.codegen import compiler, golden, runner, units
from fa4gen.codegen.attention import attention_launch
from fa4gen.codegen.backends import BackendError, BackendUnavailable, Compiled, Launch
from fa4gen.codegen.backends.cuda import CudaBackend, DeviceArray, device_arch
from fa4gen.codegen.backends.emulator import EmulatorBackend
from fa4gen.codegen.config import Config, load_config, shipped_configs
from fa4gen.codegen.feature_inputs import feature_inputs
from fa4gen.codegen.geometry import derive
from fa4gen.codegen.render import has_attention, render


@pytest.fixture(scope="module")
def gpu() -> CudaBackend:
    return CudaBackend(repeats=0)


def compiled(config: Config, arch: str, file: str) -> Compiled:
    module = compiler.compile_source(render(config, arch)[file], arch, file)
    return Compiled(arch, module.ptx, module.cubin)


def test_no_gpu_is_said_in_one_line():
    try:
        device_arch()
    except BackendUnavailable:
        pass
    else:
        pytest.skip("there is a GPU")
    with pytest.raises(BackendUnavailable) as refused:
        CudaBackend()
    assert "\n" not in str(refused.value)


@pytest.mark.gpu
@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", shipped_configs())
def test_unit_kernels_are_bit_equal_to_the_emulator(gpu, name, seed):
    config = load_config(name)
    geo = derive(config, gpu.arch)
    module = compiled(config, gpu.arch, "unit.cu")
    for on_gpu, emulated in zip(units.cases(config, geo, seed=seed), units.cases(config, geo, seed=seed), strict=True):
        gpu.run(module, on_gpu.launch)
        assert EmulatorBackend().run(module, emulated.launch).hazards == []
        for output, array in on_gpu.outputs.items():
            assert array.tobytes() == emulated.outputs[output].tobytes(), f"{on_gpu.entry} {output}"
        assert on_gpu.judge().ok


# (batch, keys, q_len, group): every value of the acceptance list, each pair of values at least once per few shapes.
SHAPES = [
    (batch, keys, q_len, group)
    for index, (keys, q_len, group) in enumerate(itertools.product((1, 63, 64, 65, 1000, 8192), (1, 4, 32), (1, 2, 6, 8)))
    for batch in (1 + index % 4,)
]


@pytest.mark.gpu
@pytest.mark.parametrize("mask", ["none", "causal"])
@pytest.mark.parametrize("name", [name for name in shipped_configs() if has_attention(load_config(name), "sm_90a")])
def test_attention_is_right_on_the_gpu(gpu, name, mask):
    config = load_config(name)
    if mask != config.mask and config.features():
        pytest.skip(f"{name} is a model's, with the mask that it has")
    config = config.model_copy(update={"mask": mask})
    if not has_attention(config, gpu.arch):
        pytest.skip(f"no full kernel for {gpu.arch}")
    geo = derive(config, gpu.arch)
    module = compiled(config, gpu.arch, "attention.cu")
    scale = 1 / math.sqrt(config.ov_depth)
    failures = []
    for seed, (batch, keys, q_len, group) in enumerate(SHAPES):
        group = config.group or group
        dtype = units.DTYPES[config.dtype]
        q, k, v = golden.attention_input(
            seed, batch=batch, q_len=q_len, q_heads=2 * group, kv_heads=2, keys=keys, depth=config.ov_depth, dtype=dtype
        )
        inputs = feature_inputs(config, q, k, v)
        launch = attention_launch(config, geo, inputs.q, inputs.k, inputs.v, inputs.out, inputs.lse, scale=scale, **inputs.arrays)
        gpu.run(module, launch)
        verdicts = runner.judge_attention(inputs.plain_out, inputs.plain_lse, *inputs.expected(scale))
        if not all(verdict.ok for verdict in verdicts):
            failures.append((batch, keys, q_len, group, *verdicts))
    assert failures == []


OVERRUN = """
extern "C" __global__ void overrun(float* out) { out[threadIdx.x] = 1.0f; }
"""


@pytest.mark.gpu
def test_an_overrun_is_an_error(gpu):
    module = compiler.compile_source(OVERRUN, gpu.arch, "overrun.cu")
    out = np.zeros(31, np.float32)
    with pytest.raises(BackendError, match="overrun wrote outside"):
        gpu.run(Compiled(gpu.arch, module.ptx, module.cubin), Launch("overrun", (1, 1, 1), (32, 1, 1), 0, [out]))


@pytest.mark.gpu
def test_another_architecture_is_refused(gpu):
    other = "sm_100a" if gpu.arch == "sm_90a" else "sm_90a"
    module = compiler.compile_source(OVERRUN, other, "overrun.cu")
    with pytest.raises(BackendError, match=other):
        gpu.run(Compiled(other, module.ptx, module.cubin), Launch("overrun", (1, 1, 1), (1, 1, 1), 0, [np.zeros(1, np.float32)]))


@pytest.mark.gpu
def test_a_prepared_launch_repeats_on_resident_arrays(gpu):
    source = (
        'extern "C" __global__ void add(const float* x, float* sum, float* copied) { sum[threadIdx.x] += x[threadIdx.x]; *copied += 1.0f; }'
    )
    module = compiler.compile_source(source, gpu.arch, "add.cu")
    total, counter = DeviceArray((32,), np.float32), np.zeros(1, np.float32)
    total.fill(0)
    x = np.arange(32, dtype=np.float32)
    launch = Launch("add", (1, 1, 1), (32, 1, 1), 0, [x, total.stand_in, counter])
    prepared = gpu.prepare(Compiled(gpu.arch, module.ptx, module.cubin), launch, [total])
    for _ in range(3):
        prepared.enqueue()
    assert (total.fetch() == 3 * x).all()
    assert counter[0] == 0, "an array that was copied for the launch is not written back"
    prepared.free()
    total.free()
