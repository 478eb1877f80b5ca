"""`python -m lazy_backend.report run.jsonl`: the page of a run that was logged. See `diagnostics.page.main`.

To Python, `lazy_backend.report` is the function of `diagnostics.page`. Importing this file as a module would put the
module in the function's place, so that is refused.
"""

import sys

from lazy_backend.diagnostics.page import main

if __name__ != "__main__":
    raise ImportError("lazy_backend.report is a function and a command: from lazy_backend import report")

sys.exit(main())
