"""Attention over pages. `reference.py` is the specification; `dispatch.py` chooses a kernel."""
