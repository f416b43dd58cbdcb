"""The fa4gen command: click commands only; the work is done in codegen/."""
