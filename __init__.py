"""fa4gen: specialised attention kernels for small query tiles, generated, compiled, run and checked."""

__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    # Imported when first used: `import fa4gen` and the command line stay light.
    if name == "attention":
        from .codegen.api import attention

        return attention
    if name == "load_exported":
        from .codegen.exported import load_exported

        return load_exported
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
