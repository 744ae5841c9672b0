"""Hypothesis profiles: `dev` explores, `ci` repeats itself, `thorough` is for `make test-all`.

None has a deadline: on a busy machine one example may wait for the disk, and every test has a timeout anyway.
"""

from hypothesis import settings

settings.register_profile("dev", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
settings.register_profile("thorough", deadline=None, max_examples=1_000, print_blob=True)
settings.load_profile("dev")
