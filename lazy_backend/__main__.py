"""`python -m lazy_backend`: the self-check. `--no-compile` leaves out what takes seconds. `repro`: as of the cache."""

import sys

from lazy_backend.archives import commands
from lazy_backend.self_check import main

sys.exit(commands.main(sys.argv[1:]) if sys.argv[1:2] == ["repro"] else main())
