"""`python -m covenant.prove`."""

import sys

from covenant.prove.command import main

sys.exit(main(sys.argv[1:]))
