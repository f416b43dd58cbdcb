"""`fa4gen bench`: what a config's kernel takes on the GPU at hand, next to the read ceiling, its own loads, and the peers installed there.

cells.py: what is measured. measure.py: how, through the driver API. peers.py: the other implementations, all optional. report.py: table,
JSON, plot. command.py: the run as a whole.
"""
