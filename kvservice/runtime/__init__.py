"""A manager or a worker as a process serves it: everything assembled, to start and to stop.

For the command line, for Ray actors, and for tests. A manager does without torch, so that each
has a module of its own.
"""
