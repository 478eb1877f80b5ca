"""`python -m lazy_backend.cache`: the disk cache of compiled graphs from a shell."""

import sys

from lazy_backend.archives.commands import main

sys.exit(main())
