"""fa4gen: specialised attention kernels for small query tiles, generated, compiled, run and checked."""

__version__ = "0.1.0"
