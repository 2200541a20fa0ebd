"""`python -m kvservice` is `kvservice`."""

import sys

from kvservice.cli import main

sys.exit(main())
