"""`fa4gen inspect`: what lies where, who waits for whom and what a kernel takes: tables, a picture, a trace."""

from .command import InspectError, InspectOptions, run

__all__ = ["InspectError", "InspectOptions", "run"]
