"""The pure part: decisions on plain values. Standard library only, no I/O, time is an argument."""
