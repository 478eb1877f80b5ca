"""`python -m lazy_backend`: the self-check. `--no-compile` leaves out what takes seconds."""

import sys

from lazy_backend.self_check import main

sys.exit(main())
